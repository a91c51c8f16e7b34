"""Start a tool: `python tools running OPTION ...`. running.sh, loading.sh and compose.sh do this.

Python finds the modules beside a folder's __main__.py also with -I or PYTHONSAFEPATH.
"""

import runpy
import sys

if __name__ == "__main__":
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
