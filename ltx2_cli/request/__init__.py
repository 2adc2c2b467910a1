"""What is asked for: the request, its profiles and files, and what is wrong with it by itself."""
