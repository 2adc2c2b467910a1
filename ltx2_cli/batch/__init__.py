"""Many requests: the lines of a file of jobs, the names of their clips, and who makes which."""
