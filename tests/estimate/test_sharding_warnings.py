"""Warnings of a sharding, and their absence where there is nothing to warn of."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from devices import gpu
from ltx2_cli.estimate.collectives import collectives
from ltx2_cli.estimate.estimate import estimate_plan, sharding_warnings
from ltx2_cli.parallel.mesh import ShardingPlan
from ltx2_cli.plan.resolve import plan_offline
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.weights.declare import Scope, Weight

LAYERS, WIDTH, INNER = 6, 16, 48
GATHER = """
ENTRY %main (x: f32[1]) -> f32[1] {
  %far = f32[500000000] all-gather(%x), replica_groups={{0,1,2,3},{4,5,6,7}}
  %near = f32[500000000] all-gather(%x), replica_groups={{0,4},{1,5},{2,6},{3,7}}
}
"""


@pytest.fixture(scope="module")
def plan() -> ShardingPlan:
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("heads", "embed"))
    return ShardingPlan(mesh, (("embed", "embed"), ("heads", "heads")), (("rows", "heads"), ("tokens", "embed")))


@pytest.fixture
def to_q() -> Weight:
    return projection("to_q")


def projection(name: str) -> Weight:
    blocks = Scope(jnp.float32).stacked("blocks", range(LAYERS))
    return (blocks / "attn1" / name).weight("weight", (INNER, WIDTH), ("heads", "embed"))


def test_split_input_channels_are_reported(plan: ShardingPlan, to_q: Weight):
    (sentence,) = sharding_warnings([to_q, projection("to_k"), projection("to_out")], plan, {}, math.inf)
    assert sentence == (
        "the input channels of 2 projections to queries, keys and values are split along mesh axis `embed`:"
        " every layer gathers these weights or sums their products"
    )


def test_communication_of_split_channels_is_reported_for_a_compiled_forward(plan: ShardingPlan, to_q: Weight):
    """Three of four parts of two billion bytes, along that axis alone."""
    (sentence,) = sharding_warnings([to_q], plan, {}, math.inf, collectives(GATHER, plan.mesh))
    assert sentence.endswith("; a device sends 1.5 GB along it in a forward")


def test_unsplit_input_channels_are_not_reported(plan: ShardingPlan, to_q: Weight):
    assert not list(sharding_warnings([to_q], replace(plan, weights=(("heads", "heads"),)), {}, math.inf))
    mesh = Mesh(np.asarray(jax.devices()).reshape(8, 1), ("heads", "embed"))
    assert not list(sharding_warnings([to_q], replace(plan, mesh=mesh), {}, math.inf))


def test_lengths_that_do_not_divide_are_reported(plan: ShardingPlan):
    assert not list(sharding_warnings([], plan, {"rows": 2, "tokens": 40, "heads": 5}, math.inf))
    (sentence,) = sharding_warnings([], plan, {"rows": 2, "tokens": 42}, math.inf)
    assert "42 tokens do not divide by the 4 of mesh axis `embed`" in sentence


def test_replicated_weights_are_reported(plan: ShardingPlan, to_q: Weight):
    size = LAYERS * INNER * WIDTH * 4
    whole = replace(plan, weights=())
    (sentence,) = sharding_warnings([to_q], whole, {}, 2 * size - 1)
    assert "whole on each of 8 devices" in sentence
    assert not list(sharding_warnings([to_q], whole, {}, 2 * size))
    assert not any("lie whole" in sentence for sentence in sharding_warnings([to_q], plan, {}, 1))
    one = ShardingPlan(Mesh(np.asarray(jax.devices()[:1]), ("device",)), (), ())
    assert not list(sharding_warnings([to_q], one, {}, 1))


@pytest.mark.parametrize(("offload", "told"), [("none", True), ("layers", False)])
def test_weights_on_the_host_are_not_on_devices(offload: str, told: bool):
    devices = tuple(replace(gpu(16)[0], id=number) for number in range(2))
    spec = read_spec(prompt="rain", model="ltx2.3", weights="int8", offload=offload)
    warnings = estimate_plan(plan_offline(spec, devices)).warnings
    assert any("lie whole on each of 2 devices" in sentence for sentence in warnings) == told
