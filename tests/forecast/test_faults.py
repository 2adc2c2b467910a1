"""Each fault in a program of one stacked matrix that has it, and its absence in one that has not."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ltx2_cli.forecast.faults import faults, gathered_weights, replicated, summed_projections, undivided
from ltx2_cli.forecast.hlo import Collective, collectives
from ltx2_cli.forecast.memory import local_shape, weight_bytes
from ltx2_cli.forecast.program import Array
from ltx2_cli.sharding import ShardingPlan
from ltx2_cli.weights.declare import Scope, Weight

LAYERS, TOKENS, WIDTH, INNER = 6, 40, 16, 48
Projection = Callable[[ShardingPlan, jax.Array, jax.Array], jax.Array]


@pytest.fixture(scope="module")
def plan() -> ShardingPlan:
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("heads", "embed"))
    return ShardingPlan(mesh, (("embed", "embed"), ("heads", "heads")), (("rows", "heads"), ("tokens", "embed")))


@pytest.fixture
def to_q() -> Weight:
    blocks = Scope(jnp.float32).stacked("blocks", LAYERS)
    return (blocks / "attn1" / "to_q").weight("weight", (INNER, WIDTH), ("heads", "embed"))


def placed(plan: ShardingPlan, x: jax.Array, *spec: str | None) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(plan.mesh, PartitionSpec(*spec)))


def gathering(plan: ShardingPlan, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Every device needs all input channels: XLA gathers the kernel, not the tokens, which are split already."""
    return placed(plan, x, None, "embed", None) @ placed(plan, kernel, "heads", None).mT


def summing(plan: ShardingPlan, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return placed(plan, placed(plan, x, None, None, "embed") @ kernel.mT, None, None, "heads")


def compiled(plan: ShardingPlan, weight: Weight, project: Projection) -> list[Collective]:
    def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
        made = project(plan, x, kernel)
        return x + jnp.sin(made).sum(axis=-1, keepdims=True), None

    value = weight.get_value()
    stack = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=plan.weight(weight.axes))
    x = jax.ShapeDtypeStruct((1, TOKENS, WIDTH), jnp.float32, sharding=plan.replicated)
    program = jax.jit(lambda x, stack: jax.lax.scan(layer, x, stack)[0])
    return collectives(program.lower(x, stack).compile().as_text(), plan.mesh)


def test_a_weight_that_is_gathered_in_every_layer(plan: ShardingPlan, to_q: Weight):
    found = compiled(plan, to_q, gathering)
    (sentence,) = gathered_weights(found, [to_q], plan)
    assert "`embed` in every layer" in sentence
    assert sentence.endswith(": blocks.*.attn1.to_q.weight")
    (gather,) = (each for each in found if each.kind == "all-gather" and each.stacks != (None,))
    assert gather.wire_bytes == LAYERS * (INNER // 2) * WIDTH * 4 * 3 // 4
    assert not list(summed_projections(found, [to_q], plan))


def test_activations_that_are_gathered_are_no_weights(plan: ShardingPlan, to_q: Weight):
    """The very shapes of a weight, but not cut out of a stack; or out of a stack of another length."""
    found = compiled(plan, to_q, gathering)
    assert not list(gathered_weights([replace(each, stacks=(None,)) for each in found], [to_q], plan))
    whole = replace(plan, weights=(("heads", "heads"),))  # where it is not split, nothing was gathered for it
    unsplit = [replace(each, stacks=(Array("f32", local_shape(to_q, whole)),)) for each in found]
    assert not list(gathered_weights(unsplit, [to_q], whole))
    other = (Scope(jnp.float32).stacked("others", LAYERS + 1) / "to_q").weight(
        "weight", (INNER, WIDTH), ("heads", "embed")
    )
    assert not list(gathered_weights(found, [other], plan))


def test_projections_that_are_summed(plan: ShardingPlan, to_q: Weight):
    found = compiled(plan, to_q, summing)
    (sentence,) = summed_projections(found, [to_q], plan)
    assert "1 projections" in sentence
    assert "mesh axis `embed`" in sentence
    assert not list(gathered_weights(found, [to_q], plan))


def test_sums_of_other_products_are_no_fault(plan: ShardingPlan, to_q: Weight):
    found = compiled(plan, to_q, summing)
    to_out = (Scope(jnp.float32).stacked("blocks", LAYERS) / "to_out").weight(
        "weight", (INNER, WIDTH), ("heads", "embed")
    )
    whole = replace(plan, weights=(("heads", "heads"),))
    elsewhere = [replace(each, loops=(LAYERS + 1,)) for each in found]
    narrower = [replace(each, results=(Array("f32", (1, TOKENS, INNER)),)) for each in found]
    assert not list(summed_projections(elsewhere, [to_q], plan))
    assert not list(summed_projections(narrower, [to_q], plan))
    assert not list(summed_projections(found, [to_out], plan))
    assert not list(summed_projections(found, [to_q], whole))


def test_lengths_that_do_not_divide(plan: ShardingPlan):
    assert not list(undivided(plan, {"rows": 2, "tokens": 40, "heads": 5}))
    (sentence,) = undivided(plan, {"rows": 2, "tokens": 42})
    assert "42 tokens do not divide by the 4 of mesh axis `embed`" in sentence


def test_weights_that_lie_whole_everywhere(plan: ShardingPlan, to_q: Weight):
    size = LAYERS * INNER * WIDTH * 4
    whole = replace(plan, weights=())
    (sentence,) = replicated([to_q], whole, 2 * size - 1)
    assert "whole on each of 8 devices" in sentence
    assert not list(replicated([to_q], whole, 2 * size))
    assert not list(replicated([to_q], plan, 1))
    one = ShardingPlan(Mesh(np.asarray(jax.devices()[:1]), ("device",)), (), ())
    assert not list(replicated([to_q], one, 1))


def test_all_faults_together(plan: ShardingPlan, to_q: Weight):
    assert faults([], [to_q], plan, {}, 1e9) == []
    found = [*compiled(plan, to_q, gathering), *compiled(plan, to_q, summing)]
    bias = (Scope(jnp.float32) / "proj_in").weight("bias", (1000,), (None,))
    sentences = faults(found, [to_q, bias], plan, {"rows": 1}, 7999)
    assert [sentence.split()[0] for sentence in sentences] == ["weights", "the", "1", "0.0"]


def test_what_a_device_holds_of_a_weight(plan: ShardingPlan, to_q: Weight):
    assert local_shape(to_q, plan) == (LAYERS, INNER // 2, WIDTH // 4)
    assert local_shape(to_q, plan, ("embed",)) == (LAYERS, INNER // 2, WIDTH)
    half = to_q.with_value(jax.ShapeDtypeStruct(to_q.get_value().shape, jnp.bfloat16))
    assert weight_bytes([to_q, half], plan) == LAYERS * INNER * WIDTH // 8 * (4 + 2)
