"""A layer on parts of the tokens: which, in which order, and that they are the whole."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from devices import tpus
from ltx2_cli.nn.attention import TokenAxis
from ltx2_cli.nn.layers import Linear
from ltx2_cli.nn.token_parts import LayerStep, join_tokens, part_sizes, run_in_parts, split_tokens
from ltx2_cli.parallel.constrain import activate
from ltx2_cli.parallel.mesh import ShardingPlan
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.quantized_matrix import quantize
from ltx2_cli.weights.tensors import MatrixType

WEIGHTS = (("heads", "heads"), ("mlp", "heads"))
ACTIVATIONS = (("rows", "passes"), ("tokens", "tokens"), ("heads", "heads"))


def plan_on(devices: Sequence[object], **mesh: int) -> ShardingPlan:
    axes = {"passes": 1, "tokens": 1, "heads": 1} | mesh
    grid = np.asarray(devices).reshape(tuple(axes.values()))
    return ShardingPlan(Mesh(grid, tuple(axes)), WEIGHTS, ACTIVATIONS)


@pytest.mark.parametrize(
    ("kind", "mesh", "rows", "tokens", "sizes"),
    [
        ("TPU v6 lite", {"passes": 4, "heads": 2}, 4, 6144, [1024] * 6),
        ("TPU v6 lite", {"tokens": 4, "heads": 2}, 4, 14080, [640] * 5 + [320]),  # whole tiles, but for the last
        ("TPU v6 lite", {"passes": 4, "heads": 2}, 4, 1536, [768] * 2),  # else they would wait for weights
        ("TPU v6 lite", {"passes": 4, "heads": 2}, 4, 126, [126]),
        ("TPU v6 lite", {"passes": 4, "tokens": 2}, 4, 6144, [3072]),  # no pair
        ("TPU v6 lite", {"passes": 2, "heads": 4}, 2, 6144, [6144]),  # four devices have no permute for their sums
        ("another", {"passes": 4, "heads": 2}, 4, 9, [5, 4]),
    ],
)
def test_parts_are_as_many_as_hide_what_is_sent(
    kind: str, mesh: dict[str, int], rows: int, tokens: int, sizes: list[int]
) -> None:
    with activate(plan_on(tpus(kind, 8), **mesh)):
        assert part_sizes(rows, tokens, "tokens", eight_bits=False) == sizes


@pytest.mark.parametrize(
    ("mesh", "rows", "tokens", "sizes"),
    [
        ({"passes": 4, "heads": 2}, 4, 6144, [6144]),  # its activations are small
        ({"heads": 8}, 4, 6144, [1536] * 4),  # of 6,144 positions at least
        ({"tokens": 8}, 4, 32768, [2048] * 2),
        ({"heads": 8}, 4, 24576, [6144] * 4),  # more parts would save nothing
    ],
)
def test_many_tokens_are_in_parts_on_gpus(mesh: dict[str, int], rows: int, tokens: int, sizes: list[int]) -> None:
    """To save memory."""
    devices = [replace(device, platform="gpu") for device in tpus("NVIDIA H100", 8)]
    with activate(plan_on(devices, **mesh)):
        assert part_sizes(rows, tokens, "tokens", eight_bits=False) == sizes


def test_parts_of_products_in_eight_bits_are_larger() -> None:
    with activate(plan_on(tpus("TPU v6 lite", 8), passes=4, heads=2)):
        assert part_sizes(4, 6144, "tokens", eight_bits=True) == [1536] * 4


def test_devices_of_one_chip_send_at_once() -> None:
    assert plan_on(tpus("TPU7x", 8, cores=2), passes=2, heads=4).overlaps("heads")
    on_chips = plan_on(tpus("TPU7x", 8, cores=2), passes=4, heads=2)
    assert not on_chips.overlaps("heads")
    assert on_chips.pair("heads") is None


@pytest.mark.parametrize("cores", [1, 2])  # devices of two chips, and of one
@pytest.mark.parametrize("kind", [None, MatrixType(np.dtype(np.int8), rounds_input=True)], ids=str)
def test_sums_of_a_pair_are_whole_on_chips_and_between_them(cores: int, kind: MatrixType | None) -> None:
    """As described devices: their program is traced, and does not run."""

    layer = Linear(Scope(jnp.bfloat16, matrices=kind), 64, 32, ("mlp", "embed"), bias=False)
    matrix = jax.eval_shape(lambda w: quantize(w, kind) if kind else w, jax.ShapeDtypeStruct((32, 64), jnp.bfloat16))
    layer.kernel = layer.kernel.with_value(matrix)
    with activate(plan_on(tpus("TPU7x", 8, cores=cores), passes=4, heads=2)):
        traced = jax.make_jaxpr(lambda layer, x: layer(x))(layer, jax.ShapeDtypeStruct((4, 6, 64), jnp.bfloat16))
    assert [each.shape for each in traced.out_avals] == [(4, 6, 32)]
    assert ("ppermute" in str(traced)) == (cores == 1)


def test_parts_of_every_device_make_the_whole_again() -> None:
    x = np.arange(2 * 12 * 3, dtype=np.float32).reshape(2, 12, 3)
    with activate(plan_on(jax.devices(), passes=1, tokens=4, heads=2)):
        parts = split_tokens(x, [2, 1], 1)
        assert [part.tolist() for part in parts[1][0]] == x[0, 2::3].tolist()
        np.testing.assert_array_equal(join_tokens(parts, "tokens"), x)


@dataclass
class Inputs:
    """Inputs of a layer that know their tokens alone."""

    tokens: TokenAxis
    part: int = 0

    def parts(self, sizes: Sequence[int]) -> "list[Inputs]":
        return [Inputs(self.tokens, number) for number in range(len(sizes))]


def test_each_part_is_a_step_behind_the_one_before_it_and_computed_after_it() -> None:
    """Else XLA for TPUs would compute a step of all parts at once, and wait for what they send."""
    seen: list[tuple[str, int, int]] = []

    def step(number: int) -> LayerStep:
        def start(x: jax.Array, inputs: Inputs) -> jax.Array:
            seen.append(("start", number, inputs.part))
            return 2 * x

        def finish(x: jax.Array, started: jax.Array, inputs: Inputs) -> jax.Array:
            seen.append(("finish", number, inputs.part))
            return x + started

        return LayerStep(start, finish)

    def layer(x: jax.Array) -> jax.Array:
        return run_in_parts([step(0), step(1)], (x,), Inputs(TokenAxis("tokens")), eight_bits=False)

    x = jnp.arange(8.0).reshape(1, 4, 2)
    with activate(plan_on(jax.devices(), passes=4, heads=2)):
        traced = jax.make_jaxpr(layer)(x)
        np.testing.assert_array_equal(layer(x), 9 * x)
    order = [("start", 0, 0), ("start", 0, 1), ("finish", 0, 0), ("start", 1, 0)]
    order += [("finish", 0, 1), ("start", 1, 1), ("finish", 1, 0), ("finish", 1, 1)]
    assert seen == 2 * order  # traced, and run
    assert str(traced).count("optimization_barrier") == 5  # between six turns of a part
