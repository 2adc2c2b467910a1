"""Samplers, a file each, which is named as requests name it."""
