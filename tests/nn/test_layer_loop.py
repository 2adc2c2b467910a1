"""Layers that come from the host while others are computed, by the schedules of the compilers of TPUs and GPUs."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from compilers import needs_cuda, needs_libtpu
from ltx2_cli.estimate.hlo import computations
from ltx2_cli.estimate.offline import topology
from ltx2_cli.nn.layer_loop import StackedLayers, scan_periods
from ltx2_cli.nn.layers import FeedForward, Linear
from ltx2_cli.parallel.constrain import activate
from ltx2_cli.parallel.jit import jitted
from ltx2_cli.parallel.mesh import ShardingPlan
from ltx2_cli.request.spec import Offload
from ltx2_cli.weights.declare import Scope, map_weights
from ltx2_cli.weights.quantized_matrix import placed
from ltx2_cli.weights.tensors import MatrixType

LAYERS, TOKENS, WIDTH = 6, 2048, 1024
OPERATION = re.compile(r" = .*? ([a-z-]+)\(")
ENDS = "start", "done"
INT8, INT4 = MatrixType(np.dtype(jnp.int8)), MatrixType(np.dtype(jnp.int4), group_size=256)
NUMBERS = 2 * 4 * WIDTH**2  # of a layer
BYTES = {None: 2, INT8: 1, INT4: 0.5}  # of a number


def loops(text: str) -> list[list[tuple[str, str]]]:
    """Kind and line of each operation that is issued in each loop that copies layers, the innermost first."""
    bodies = [body.splitlines() for body in computations(text)[0].values() if "dynamic-slice-start(" in body]
    return [[(found[1], line) for line in body if (found := OPERATION.search(line))] for body in bodies]


def steps(network: nnx.Module, x: jax.Array, count: jax.Array) -> jax.Array:
    """A loop of layers within one of steps."""

    def step(_: jax.Array, x: jax.Array) -> jax.Array:
        return StackedLayers(network).scan(lambda x, layer: (x + layer(x), None), x)[0]

    return jax.lax.fori_loop(0, count, step, x)


def compiled_steps(device: str, matrices: MatrixType | None, input_major: bool) -> tuple[jax.stages.Compiled, int]:
    """`steps` for a device that is not here, with layers in the host's memory; and the bytes of a layer."""
    plan = ShardingPlan(Mesh(np.asarray(topology(device)), ("device",)), (), (), input_major=input_major)
    plan = replace(plan, offload=Offload.layers)
    network = FeedForward(Scope("bfloat16", matrices=matrices).stacked("blocks", range(LAYERS)), WIDTH)
    network = map_weights(lambda weight: weight.with_value(placed(weight.get_value(), plan.place(weight))), network)
    x = jax.ShapeDtypeStruct((1, TOKENS, WIDTH), jnp.bfloat16, sharding=plan.replicated)
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=plan.replicated)
    compiled = jitted(steps, plan.replicated, plan).lower(network, x, count).compile()
    return compiled, round(NUMBERS * BYTES[matrices])


@needs_libtpu
@pytest.mark.parametrize("matrices", [None, INT8], ids=["bfloat16", "int8"])
def test_layers_arrive_beside_products(matrices: MatrixType | None) -> None:
    """Of the host's memory slices are copied, no stack. Copies run beside the products of a turn, which has two
    layers."""
    compiled, layer = compiled_steps("v6e:1x1", matrices, input_major=True)
    text = compiled.as_text() or ""
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * layer
    assert not re.search(rf"copy(-start)?\(\S*{LAYERS},({WIDTH}|{4 * WIDTH}),", text)
    turn = loops(text)[0]
    starts, ends = ([at for at, (kind, _) in enumerate(turn) if kind == f"dynamic-slice-{end}"] for end in ENDS)
    products = [at for at, (_, line) in enumerate(turn) if "kind=kOutput" in line]
    assert len(starts) == len(ends) == len(products) == 4
    assert starts[0] < products[0] < products[1] < ends[0]
    assert starts[-1] < products[2] < ends[1]


@needs_libtpu
def test_layers_in_four_bits_arrive_in_slices() -> None:
    """They are packed until they are used. One of two layers waits for its copy."""
    compiled, layer = compiled_steps("v6e:1x1", INT4, input_major=True)
    text = compiled.as_text() or ""
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * layer + NUMBERS / 2
    assert not re.search(rf"copy(-start)?\(\S*{LAYERS},({WIDTH // 2}|{2 * WIDTH}),", text)
    assert [kind for kind, _ in loops(text)[0]].count("dynamic-slice-start") == 4


@needs_libtpu
def test_a_tpu_rotates_inputs_where_they_lie() -> None:
    """Its groups of channels are never an axis of their own, for which libtpu would copy the whole input."""
    plan = ShardingPlan(Mesh(np.asarray(topology("v6e:1x1")), ("device",)), (), ())
    linear = Linear(Scope("bfloat16", matrices=INT4._replace(rounds_input=True)), WIDTH, WIDTH, ("embed", "heads"))
    linear = map_weights(lambda weight: weight.with_value(placed(weight.get_value(), plan.place(weight))), linear)
    x = jax.ShapeDtypeStruct((4, TOKENS, WIDTH), jnp.bfloat16, sharding=plan.replicated)

    def run(linear: Linear, x: jax.Array) -> jax.Array:
        with activate(plan):
            return linear(linear.prepare(x))

    text = jax.jit(run).lower(linear, x).compile().as_text() or ""
    assert f"bf16[4,{TOKENS},{WIDTH}]" in text
    assert not re.search(rf"\[4,{TOKENS},{WIDTH // 256},256\]", text)
    assert not re.search(rf" = bf16\[4,{TOKENS},{WIDTH}\]\S* copy\(", text)


@needs_cuda
@pytest.mark.parametrize("matrices", [INT8, INT4], ids=["int8", "int4"])
def test_layers_arrive_at_a_gpu_beside_products(matrices: MatrixType) -> None:
    compiled, layer = compiled_steps("rtx4090", matrices, input_major=False)
    memory = compiled.memory_analysis()
    assert memory is not None
    assert (memory.host_argument_size_in_bytes, memory.argument_size_in_bytes < NUMBERS) == (LAYERS * layer, True)
    text = compiled.as_text() or ""
    turns = [body for body in computations(text)[0].values() if "cublas" in body and "fusion-start(" in body]
    (turn,) = [turn.splitlines() for turn in turns]
    products = [at for at, line in enumerate(turn) if "__cublas$lt$matmul" in line]
    starts = {found[1]: at for at, line in enumerate(turn) if (found := re.search(r"%(\S+) = .*fusion-start\(", line))}
    copies = [
        (starts[found[1]], at) for at, line in enumerate(turn) if (found := re.search(r"fusion-done\(%(\S+)\)", line))
    ]
    assert (len(copies), len(products)) == (4, 8 if matrices is INT4 else 4)  # inputs are rotated by a product too
    assert all(any(start < at < end for at in products) for start, end in copies)


@needs_libtpu
def test_layers_of_a_period_arrive_one_at_a_time() -> None:
    """A turn of the loop has all layers of a period, of which two are on the device at a time."""
    plan = ShardingPlan(Mesh(np.asarray(topology("v6e:1x1")), ("device",)), (), (), input_major=True)
    plan, period = replace(plan, offload=Offload.layers), 6
    places = [
        FeedForward(Scope("bfloat16").stacked("blocks", range(place, 2 * period, period)), WIDTH)
        for place in range(period)
    ]
    places = [
        map_weights(lambda weight: weight.with_value(placed(weight.get_value(), plan.place(weight))), place)
        for place in places
    ]
    x = jax.ShapeDtypeStruct((1, TOKENS, WIDTH), jnp.bfloat16, sharding=plan.replicated)

    def run(places: list[nnx.Module], x: jax.Array) -> jax.Array:
        with activate(plan):
            return scan_periods(places, lambda x, place, layer: (x + layer(x), None), x, list)[0]

    compiled = jax.jit(run).lower(places, x).compile()
    layer = 2 * 4 * WIDTH**2 * 2
    # two layers, the place in the state of the loop, and the activations of one
    assert compiled.memory_analysis().temp_size_in_bytes < 4.5 * layer
    turn = loops(compiled.as_text() or "")[0]
    starts, ends = ([at for at, (kind, _) in enumerate(turn) if kind == f"dynamic-slice-{end}"] for end in ENDS)
    products = [at for at, (_, line) in enumerate(turn) if "kind=kOutput" in line]
    assert len(starts) == len(ends) == len(products) == 2 * period
    assert all(starts[2 * place] < products[2 * place + 1] < ends[2 * place] for place in range(period))
