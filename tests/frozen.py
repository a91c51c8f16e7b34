"""The last import of the process that forked_runs.py forks: runs look for no garbage in it."""

import gc

gc.collect()
gc.freeze()
