"""Requests: their profiles, files and checks."""
