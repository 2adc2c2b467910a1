"""What a command does, callable from Python: checks before a run, the run, its resumption, and many runs."""
