"""The training loop: what is broken off goes on to the same weights, and a course that ended is only read."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ltx2_cli.nn.conv1d import ConvTranspose1d
from ltx2_cli.nn.layers import Conv, Conv3D, Linear
from ltx2_cli.weights.declare import Scope, Weight, weights
from tools.train_demo.initial import initial
from tools.train_demo.training import Course, matrix, train

COURSE = Course("line", steps=40, rate=0.3, warm_up=5, average=0.5, keep_every=10)
TRUTH = np.asarray([[1.0, -2.0, 0.5], [0.0, 1.0, 3.0]], np.float32)


class Stopped(Exception):
    pass


def begin() -> Linear:
    return initial(Linear(Scope("float32"), 3, 2, (None, None)), seed=0)


def draw(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((16, 3)).astype(np.float32)


def loss(network: Linear, batch: jax.Array, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    wanted = batch @ TRUTH.T + 0.01 * jax.random.normal(key, (16, 2))
    return jnp.mean(jnp.square(network(batch) - wanted)), {}


def values(network: Linear) -> list[np.ndarray]:
    return [np.asarray(weight.get_value()) for weight in weights(network)]


def said(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "line.jsonl").read_text().splitlines()]


def test_training_learns_and_logs_its_progress(tmp_path: Path) -> None:
    learned = train(replace(COURSE, steps=200), begin(), loss, draw, tmp_path)
    np.testing.assert_allclose(learned.kernel[...], TRUTH, atol=0.05)
    lines = said(tmp_path)
    assert [line["step"] for line in lines] == list(range(10, 201, 10))
    assert lines[-1]["loss"] < 0.01 < lines[0]["loss"]


def test_interrupted_training_continues_to_the_same_weights(tmp_path: Path) -> None:
    whole = train(COURSE, begin(), loss, draw, tmp_path / "whole")
    drawn: list[int] = []

    def breaking(rng: np.random.Generator) -> np.ndarray:
        drawn.append(1)
        if len(drawn) == 26:
            raise Stopped
        return draw(rng)

    with pytest.raises(Stopped):
        train(COURSE, begin(), loss, breaking, tmp_path / "parts")
    gone_on = train(COURSE, begin(), loss, draw, tmp_path / "parts")
    for ours, theirs in zip(values(gone_on), values(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert [line["step"] for line in said(tmp_path / "parts")] == [10, 20, 30, 40]


def test_a_complete_course_is_only_read(tmp_path: Path) -> None:
    first = train(COURSE, begin(), loss, draw, tmp_path)

    def never(rng: np.random.Generator) -> np.ndarray:
        raise AssertionError

    again = train(COURSE, begin(), loss, never, tmp_path)
    for ours, theirs in zip(values(again), values(first), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("network", "sides"),
    [
        (Linear(Scope("float32"), 3, 5, (None, None)), (3, 5)),
        (Conv(Scope("float32"), (3, 4, 2), ((1, 1),)), (12, 2)),
        (Conv3D(Scope("float32"), 2, 4, (1, 1)), (2, 108)),
        (ConvTranspose1d(Scope("float32"), 4, 2, 6, 3), (24, 2)),
        (Linear(Scope("float32").stacked("layers", 7), 3, 5, (None, None)), (3, 5)),
    ],
)
def test_matrices_have_their_input_and_output_axes(
    network: Linear | Conv | Conv3D | ConvTranspose1d, sides: tuple[int, int]
) -> None:
    """A window's places are on the wider side; layers are matrices of their own."""
    shape, axes = network.kernel.get_value().shape, matrix(network.kernel)
    assert axes is not None
    assert tuple(np.prod([shape[i] for i in np.atleast_1d(side)]) for side in axes) == sides


def test_computed_values_are_not_trained(tmp_path: Path) -> None:
    class Filtered(Linear):
        def __init__(self) -> None:
            super().__init__(Scope("float32"), 3, 2, (None, None))
            self.filter = Scope("float32").weight("filter", (1, 1, 12), (None, None, None))

    def filtered(network: Filtered, batch: jax.Array, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        total, figures = loss(network, batch, key)
        return total + jnp.sum(network.filter[...]), figures

    begun = initial(Filtered(), seed=0)
    learned = train(COURSE, begun, filtered, draw, tmp_path)
    np.testing.assert_allclose(learned.filter[...], begun.filter[...], rtol=1e-6)
    assert not np.array_equal(learned.kernel[...], begun.kernel[...])


def test_norms_begin_as_the_identity() -> None:
    """Those of Gemma add 1 to their weights."""
    ones = [f"transformer_blocks.*.attn1.norm_{x}.weight" for x in "qk"] + ["initial_norm.weight", "latents_std"]
    zeros = ["norm.weight", "layers.0.self_attn.q_norm.weight", "layers.1.input_layernorm.weight", "latents_mean"]
    for names, value in ((ones, 1), (zeros, 0)):
        for name in names:
            weight = initial(Scope("float32").weight(name, (4,), (None,)), seed=0)
            np.testing.assert_array_equal(weight.get_value(), np.full(4, value))


def test_biases_and_embeddings_are_no_matrices() -> None:
    scope = Scope("float32")
    rows: list[Weight] = [
        scope.weight("bias", (4,), (None,)),
        scope.weight("scale_shift_table", (6, 4), (None, None)),
        scope.weight("learnable_registers", (6, 4), (None, None)),
        (scope / "embed_tokens").weight("weight", (6, 4), (None, None)),
    ]
    assert list(map(matrix, rows)) == [None] * 4
