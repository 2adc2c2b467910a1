"""Diffusion itself: pure functions on frozen data. To this package a model is `velocity(latents, sigma)`."""
