"""What is loaded into the processes of the script, as soon as they have imported torch."""

import atexit


def install(spec):
    """Watch this process, as `spec` says; called once, when `import torch` is complete."""
    from whatif.inside.watch import Run
    if Run.active is None:
        run = Run(spec)
        run.install()
        atexit.register(run.ended)
