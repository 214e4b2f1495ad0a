"""Set apart what the process that tests fork from has imported (``fresh.HEAVY``, of which this is the last module): the garbage
collector of a forked process would look at all of it whenever an engine is built, and copy its memory by doing so."""

import gc

gc.collect()
gc.freeze()
gc.unfreeze = lambda: None
