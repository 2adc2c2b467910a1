"""What a compiled program will need and take, read from its text and from the architecture: nothing here runs it."""
