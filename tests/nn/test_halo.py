"""An image that lies in parts on several devices is convolved as one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ltx2_cli.nn.conv import Conv3D
from ltx2_cli.nn.halo import IMAGE_AXES, surround
from ltx2_cli.weights.declare import Scope, random_weights


@pytest.mark.parametrize("mirrored", [False, True], ids=["zeros", "mirrored"])
@pytest.mark.parametrize("parts", [(1, 1), (4, 1), (1, 2), (2, 4)])
def test_parts_see_their_neighbours(parts: tuple[int, int], mirrored: bool) -> None:
    layer = random_weights(Conv3D(Scope(jnp.float32), 4, 5, (1, 3, 3), (0, 0)), seed=0)
    video = np.random.default_rng(5).normal(size=(1, 2, 8, 8, 4)).astype(np.float32)

    def convolved(layer: Conv3D, video: jax.Array) -> jax.Array:
        return layer(*surround(video, mirrored))

    around = np.pad(video, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect" if mirrored else "constant")
    wanted = layer(around, ((0, 0), (0, 0)))
    mesh = Mesh(np.array(jax.devices()[: parts[0] * parts[1]]).reshape(parts), IMAGE_AXES)
    where = PartitionSpec(None, None, *IMAGE_AXES)
    split = jax.jit(jax.shard_map(convolved, mesh=mesh, in_specs=(PartitionSpec(), where), out_specs=where))
    np.testing.assert_allclose(split(layer, video), wanted, rtol=0, atol=1e-6)
    np.testing.assert_allclose(convolved(layer, video), wanted, rtol=0, atol=1e-6)
