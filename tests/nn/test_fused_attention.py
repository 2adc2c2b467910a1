"""The fused kernel as Mosaic compiles it for TPUs that are not here."""

import re
from base64 import b64decode
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered

from compilers import needs_libtpu
from ltx2_cli.estimate import offline
from ltx2_cli.nn.attention_cases import Case, drawn, packed
from ltx2_cli.nn.kernels.dispatch import attend_partly, attend_with
from ltx2_cli.nn.kernels.fused import part_length
from ltx2_cli.parallel.constrain import activate
from ltx2_cli.parallel.mesh import ShardingPlan
from ltx2_cli.request.spec import AttentionBackend

FUSED = AttentionBackend.fused


def program(topology: str, case: Case, in_part: bool = False, weighs_keys: bool = False) -> Lowered:
    """A program that attends as in a case, for one device."""
    mesh = Mesh(np.asarray(offline.topology(topology)[:1]), ("device",))
    alone = NamedSharding(mesh, PartitionSpec())
    key_weights = np.ones(case.operands.keys.shape[1], np.float32) if weighs_keys else None
    operands = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone),
        packed(FUSED, case.operands._replace(key_weights=key_weights)),
    )
    valid = jax.ShapeDtypeStruct((), jnp.int32, sharding=alone)

    def attend(operands: Any, valid: jax.Array) -> object:
        if in_part:
            return attend_partly(FUSED, operands, case.heads, valid)
        return attend_with(FUSED, operands, case.heads)

    with activate(ShardingPlan(mesh, (), (), FUSED)):
        return jax.jit(attend).lower(operands, valid)


def kernels(program: Lowered) -> list[bytes]:
    """The attention kernels of a program when it is compiled."""
    text = program.compile().as_text()
    assert "fused_attention" in text
    return [*map(b64decode, re.findall(r'"body":"([^"]*)"', text))]


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1"])
@pytest.mark.parametrize(
    ("head_size", "dtype", "in_part", "keys"),
    [
        (128, "bfloat16", False, 1),
        (128, "bfloat16", False, 300),
        (128, "bfloat16", True, 4500),  # stored in several turns
        (64, "bfloat16", True, 300),
        (64, "bfloat16", False, 4500),
        (64, "float32", False, 300),
    ],
    ids=str,
)
def test_the_kernel_compiles_for_tpus(topology: str, head_size: int, dtype: str, in_part: bool, keys: int) -> None:
    """Rotated, gated, with perturbed rows, with the weight of a part and with weights of keys, at lengths that are no
    multiples of a block. The grid says which of its axes the cores of a chip may share."""
    perturbed, weighs_keys = not in_part and keys == 300, head_size == 64
    case = drawn(300, keys, 256 // head_size, head_size, dtype, rows=2, perturbed=perturbed)
    (kernel,) = kernels(program(topology, case, in_part, weighs_keys))
    assert b"parallel" in kernel


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1"])
@pytest.mark.parametrize("head_size", [64, 128])
def test_the_longest_context_that_a_core_holds_compiles(topology: str, head_size: int) -> None:
    """It ends within a block. With 128 keys more than fit it is attended to in two parts."""
    (device, *_), heads = offline.topology(topology), 128 // head_size
    most = next(keys for keys in range(100_000, 0, -128) if part_length(device, keys, itemsize=2) == keys)
    longest, longer = (
        program(topology, drawn(300, keys, heads, head_size, "bfloat16")) for keys in (most - 70, most + 128)
    )
    assert len(kernels(longest)) == 1
    assert longer.as_text().count("@tpu_custom_call") == 2
