"""Video with sound from text: LTX-2 in JAX."""

__version__ = "0.1.0"
