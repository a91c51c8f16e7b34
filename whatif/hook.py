"""The hook that comes into each Python process of a run, as a file named sitecustomize.py.

It is alone in a folder that PYTHONPATH names. It has to be harmless in any Python, so it catches
everything. At its end comes the next sitecustomize, as if this one were not there.
"""

import os
import sys


def start():
    """Let the package `whatif` be found, and wait for the import of torch (enter.py)."""
    import json
    from importlib.machinery import ModuleSpec

    folder = os.environ.get("WHATIF", "")
    with open(os.path.join(folder, "spec.json")) as file:
        spec = json.load(file)

    class OurPackage(object):
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name != "whatif":
                return None
            found = ModuleSpec(name, None, is_package=True)
            found.submodule_search_locations = [spec["place"]]
            return found

    sys.meta_path.insert(0, OurPackage)
    from whatif import enter

    enter.enter(spec)


try:
    here = os.path.realpath(os.path.dirname(__file__))
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != here]
    start()
except Exception:  # the run is over, or this is another kind of Python
    pass
sys.modules.pop("sitecustomize", None)
import sitecustomize  # noqa: E402, F401  if there is none, site.py ignores this ImportError
