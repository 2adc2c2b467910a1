"""Plan a request: all decisions for a checkpoint and its devices, before weights are read."""
