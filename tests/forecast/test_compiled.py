"""What is read off a compiled program, and what of a compiler's refusal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ltx2_cli.core.programs import Program
from ltx2_cli.forecast.compiled import Compiled, compile_program, needed_bytes


def test_a_program_and_what_it_sends():
    """Each of eight devices holds 64 of 512 rows of 16 floats, has all after a gather, and sends 7 of 8 parts."""
    mesh = Mesh(np.asarray(jax.devices()), ("rows",))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["rows"], []))
    x = jax.ShapeDtypeStruct((512, 16), jnp.float32, sharding=split)
    gather = jax.jit(lambda x: jax.lax.with_sharding_constraint(2 * x, whole))
    made = compile_program(Program("gather", None, lambda: gather.lower(x)), mesh)
    assert isinstance(made, Compiled)
    assert (made.name, made.wire_bytes) == ("gather", 512 * 16 * 4 * 7 // 8)
    assert [each.kind for each in made.collectives] == ["all-gather"]
    assert made.memory.arguments_bytes == 64 * 16 * 4
    assert made.memory.peak_bytes >= made.memory.arguments_bytes + made.memory.temporaries_bytes
    assert made.compile_seconds > 0
    assert "ENTRY" in made.text


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Ran out of memory in memory space hbm. Used 34.50G of 31.25G hbm. Exceeded", 34.5 * 2**30),
        ("the total memory required for HLO temporaries (512.0M) exceeds available HBM (31.25G).", 2**29),
        ("Out of memory", 0),
    ],
)
def test_a_refusal_says_what_would_be_needed(message: str, expected: float):
    assert needed_bytes(f"RESOURCE_EXHAUSTED: {message}") == expected
