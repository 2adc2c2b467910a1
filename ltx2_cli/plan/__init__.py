"""What a request means for a checkpoint and its devices."""
