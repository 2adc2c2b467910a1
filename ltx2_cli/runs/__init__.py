"""The work of commands, callable from Python: checks before a run, the run, its resumption, and many runs."""
