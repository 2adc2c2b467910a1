"""What is read off a compiled program, and what of a compiler's refusal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ltx2_cli.core.programs import Program
from ltx2_cli.estimate.compiled import Compiled, compile_program, needed_bytes
from ltx2_cli.nn.layers import Linear
from ltx2_cli.weights.declare import Scope, map_weights


def test_a_program_and_its_communication_are_measured():
    """Each of eight devices holds 64 of 512 rows of 16 floats, has all after a gather, and sends 7 of 8 parts."""
    mesh = Mesh(np.asarray(jax.devices()), ("rows",))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["rows"], []))
    x = jax.ShapeDtypeStruct((512, 16), jnp.float32, sharding=split)
    gather = jax.jit(lambda x: jax.lax.with_sharding_constraint(2 * x, whole))
    program = compile_program(Program("gather", (), gather, lambda: (x,)), mesh)
    assert isinstance(program, Compiled)
    assert (program.name, program.sent_bytes) == ("gather", 512 * 16 * 4 * 7 // 8)
    assert [collective.kind for collective in program.collectives] == ["all-gather"]
    assert program.memory.arguments_bytes == 64 * 16 * 4
    assert program.memory.peak_bytes >= program.memory.arguments_bytes + program.memory.temporaries_bytes
    assert program.activation_bytes == program.memory.peak_bytes
    assert program.compile_seconds > 0
    assert "ENTRY" in program.text


def test_unread_weights_do_not_count_for_a_program():
    """Of a linear of 8 by 16 floats, split in eight parts, it reads the matrix and not the bias."""
    mesh = Mesh(np.asarray(jax.devices()), ("width",))
    split = NamedSharding(mesh, PartitionSpec("width"))
    linear = Linear(Scope(jnp.float32), 16, 8, ("width", None))
    linear = map_weights(
        lambda weight: weight.with_value(jax.ShapeDtypeStruct(weight.shape, jnp.float32, sharding=split)), linear
    )
    x = jax.ShapeDtypeStruct((4, 16), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    project = jax.jit(lambda linear, x: x @ linear.kernel[...].mT)
    program = compile_program(Program("project", (), project, lambda: (linear, x)), mesh)
    assert isinstance(program, Compiled)
    assert program.memory.peak_bytes - program.activation_bytes == 8 * 16 * 4 // 8
    assert program.memory.arguments_bytes == 8 * 16 * 4 // 8 + 4 * 16 * 4


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Ran out of memory in memory space hbm. Used 34.50G of 31.25G hbm. Exceeded", 34.5 * 2**30),
        ("the total memory required for HLO temporaries (512.0M) exceeds available HBM (31.25G).", 2**29),
        ("Out of memory", 0),
    ],
)
def test_a_compiler_refusal_states_the_needed_memory(message: str, expected: float):
    assert needed_bytes(f"RESOURCE_EXHAUSTED: {message}") == expected
