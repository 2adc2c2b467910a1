"""The fused kernel as Mosaic compiles it for TPUs that are not here."""

import re
from base64 import b64decode

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from compilers import needs_libtpu
from ltx2_cli.estimate import offline
from ltx2_cli.nn.attention_cases import drawn, packed
from ltx2_cli.nn.kernels.dispatch import attend_partly, attend_with
from ltx2_cli.parallel.constrain import activate
from ltx2_cli.parallel.mesh import ShardingPlan
from ltx2_cli.request.spec import AttentionBackend

FUSED = AttentionBackend.fused


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1"])
@pytest.mark.parametrize(
    ("head_size", "dtype", "in_part", "keys"),
    [
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
    mesh = Mesh(np.asarray(offline.topology(topology)[:1]), ("device",))
    perturbed = not in_part and keys == 300
    case = drawn(300, keys, 256 // head_size, head_size, dtype, rows=2, perturbed=perturbed)
    alone = NamedSharding(mesh, PartitionSpec())
    key_weights = np.ones(keys, np.float32) if head_size == 64 else None
    operands = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone),
        packed(FUSED, case.operands._replace(key_weights=key_weights)),
    )
    valid = jax.ShapeDtypeStruct((), jnp.int32, sharding=alone)

    def attend(operands: object, valid: jax.Array) -> object:
        if in_part:
            return attend_partly(FUSED, operands, case.heads, valid)
        return attend_with(FUSED, operands, case.heads)

    with activate(ShardingPlan(mesh, (), (), FUSED)):
        program = jax.jit(attend).lower(operands, valid).compile()
    assert "fused_attention" in program.as_text()
    (body,) = re.findall(r'"body":"([^"]*)"', program.as_text())
    assert b"parallel" in b64decode(body)
