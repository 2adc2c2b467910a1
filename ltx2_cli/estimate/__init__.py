"""Memory and time of compiled programs, by their text and the architecture. Runs nothing."""
