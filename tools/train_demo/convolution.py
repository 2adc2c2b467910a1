"""Gradients of convolutions on a CPU, where XLA takes a convolution with the whole picture as its window for that of a
kernel: 25 times as long as the convolution itself took."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.nn import layers

convolve = layers.convolve


@contextmanager
def gradients_by_products() -> Iterator[None]:
    """Networks traced in the body have a kernel's gradient as one matrix product for each place of its window."""
    layers.convolve = _convolve
    try:
        yield
    finally:
        layers.convolve = convolve


def _convolve(
    x: jax.Array, kernel: jax.Array, padding: layers.Padding, stride: int = 1, dilation: int = 1
) -> jax.Array:
    plain = stride == dilation == 1
    return by_products(x, kernel, padding) if plain else convolve(x, kernel, padding, stride, dilation)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def by_products(x: jax.Array, kernel: jax.Array, padding: layers.Padding) -> jax.Array:
    """`convolve` with stride and dilation 1: x [batch, *axes, in] under kernel [*window, in, out]."""
    return convolve(x, kernel, padding)


def _forward(x: jax.Array, kernel: jax.Array, padding: layers.Padding) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return convolve(x, kernel, padding), (x, kernel)


def _backward(
    padding: layers.Padding, inputs: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = inputs
    window = kernel.shape[:-2]
    back = tuple((size - 1 - low, size - 1 - high) for size, (low, high) in zip(window, padding, strict=True))
    of_x = convolve(cotangent, jnp.flip(kernel, range(len(window))).swapaxes(-1, -2), back)
    padded = jnp.pad(x, [(0, 0), *padding, (0, 0)])
    outputs = cotangent.reshape(-1, cotangent.shape[-1])

    def product(place: tuple[int, ...]) -> jax.Array:
        lengths = zip(place, cotangent.shape[1:-1], strict=True)
        seen = padded[(slice(None), *(slice(first, first + length) for first, length in lengths))]
        return seen.reshape(-1, seen.shape[-1]).T @ outputs

    return of_x, jnp.stack([product(place) for place in np.ndindex(*window)]).reshape(kernel.shape)


by_products.defvjp(_forward, _backward)
