from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ltx2_cli.nn import layers
from ltx2_cli.nn.layers import IMAGE_AXES, Conv3D, convolve, convolve_by_taps
from ltx2_cli.weights.declare import Scope
from tools.weights import random_weights


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("channels", [(4, 5), (5, 4), (24, 24)], ids=["wider", "narrower", "deep"])
@pytest.mark.parametrize("time_mode", ["edge", "constant"])
@pytest.mark.parametrize("reflect", [False, True], ids=["zeros", "reflect"])
@pytest.mark.parametrize("time_padding", [(2, 0), (1, 1)])
def test_a_video_convolution_equals_one_in_three_dimensions(time_padding, reflect, time_mode, channels):
    layer = random_weights(Conv3D(Scope(jnp.float32), *channels, time_padding, time_mode, reflect), seed=0)
    video = normal(2, 4, 5, 6, channels[0])
    longer = np.pad(video, ((0, 0), time_padding, (0, 0), (0, 0), (0, 0)), mode=time_mode)
    larger = np.pad(longer, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect" if reflect else "constant")
    wanted = convolve(larger, jnp.moveaxis(layer.kernel[...], 2, 0), ((0, 0),) * 3) + layer.bias[...]
    np.testing.assert_allclose(layer(video), wanted, rtol=0, atol=3e-6)


@pytest.mark.parametrize("padding", [(0, 0), (4, 4), (5, 3), (9, 0)])
@pytest.mark.parametrize(
    ("window", "dilation"), [((1,), 1), ((3,), 5), ((11,), 3), ((4,), 2), ((3, 3), 1), ((2, 3), 2)]
)
def test_a_tpu_convolves_by_taps(window, dilation, padding, monkeypatch: pytest.MonkeyPatch):
    """A product of full precision for each place of the window, and no convolution."""
    x, kernel = normal(2, *(40, 12)[: len(window)], 6), normal(*window, 6, 5)
    arguments = {"padding": (padding, (1, 2))[: len(window)], "dilation": dilation}
    wanted = convolve(x, kernel, **arguments)
    monkeypatch.setattr(layers, "device", lambda: SimpleNamespace(platform="tpu"))
    by_taps = jax.jit(partial(convolve_by_taps, **arguments)).lower(x, kernel)
    np.testing.assert_allclose(by_taps.compile()(x, kernel), wanted, rtol=0, atol=1e-5)
    assert "stablehlo.convolution" not in by_taps.as_text()
    assert by_taps.as_text().count("HIGHEST") == 2


def test_taps_of_bfloat16_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch):
    x, kernel = jnp.asarray(normal(1, 20, 20, 64), jnp.bfloat16), jnp.asarray(normal(3, 3, 64, 8), jnp.bfloat16)
    wanted = convolve(x.astype(jnp.float32), kernel.astype(jnp.float32), ((1, 1), (1, 1)))
    monkeypatch.setattr(layers, "device", lambda: SimpleNamespace(platform="tpu"))
    ours = convolve_by_taps(x, kernel, ((1, 1), (1, 1)))
    assert ours.dtype == jnp.bfloat16
    assert jnp.mean(ours == wanted.astype(jnp.bfloat16)) > 0.99  # summed in bfloat16, 0.4 are


@pytest.mark.parametrize("reflect", [False, True], ids=["zeros", "reflect"])
@pytest.mark.parametrize("parts", [(1, 1), (4, 1), (1, 2), (2, 4)])
def test_sharded_convolutions_exchange_their_edges(parts: tuple[int, int], reflect: bool) -> None:
    layer = random_weights(Conv3D(Scope(jnp.float32), 4, 5, (1, 1), "edge", reflect), seed=0)
    video = np.random.default_rng(5).normal(size=(1, 2, 8, 8, 4)).astype(np.float32)
    mesh = Mesh(np.array(jax.devices()[: parts[0] * parts[1]]).reshape(parts), IMAGE_AXES)
    where = PartitionSpec(None, None, *IMAGE_AXES)
    split = jax.jit(jax.shard_map(Conv3D.__call__, mesh=mesh, in_specs=(PartitionSpec(), where), out_specs=where))
    np.testing.assert_allclose(split(layer, video), layer(video), rtol=0, atol=1e-6)
