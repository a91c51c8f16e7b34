"""Start whatif from its folder, from an archive of it (python -m zipapp), or with `-m`."""

import os
import sys
import types


def register():
    """Make this folder or archive the package `whatif`, and take it off sys.path.

    So no module of this package hides one of the same name.
    """
    place = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != place]
    package = sys.modules["whatif"] = types.ModuleType("whatif")
    package.__path__ = [place]


def main():
    from whatif import options, run

    if run.RANK > 0:
        return 0  # rank 0 starts all processes of the script
    args = options.parse(sys.argv[1:])
    if args.kind == "comparison":
        from whatif.write import compare

        return compare.main(args)
    from whatif import session

    return session.main(args)


if __name__ == "__main__":
    if not __package__:
        register()
    sys.exit(main())
