from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from ltx2_cli.nn import conv1d
from ltx2_cli.nn.conv1d import Conv1d, ConvTranspose1d, downsample_1d, upsample_1d
from ltx2_cli.weights.declare import Scope
from tools.weights import random_weights


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("window", "stride"), [(16, 6), (15, 5), (4, 2), (5, 4), (3, 3)])
def test_a_transposed_convolution_equals_that_of_torch(window, stride):
    layer = random_weights(ConvTranspose1d(Scope(jnp.float32), 3, 4, window, stride), seed=0)
    x = normal(2, 7, 3)
    kernel, bias = (torch.from_numpy(np.array(weight[...])) for weight in (layer.kernel, layer.bias))
    trim = (window - stride) // 2
    wanted = torch.nn.functional.conv_transpose1d(
        torch.from_numpy(x).mT, kernel.permute(1, 2, 0), bias, stride=stride, padding=trim
    )
    np.testing.assert_allclose(jax.jit(lambda layer, x: layer(x))(layer, x), wanted.mT, rtol=0, atol=1e-6)


@pytest.mark.parametrize("samples", [1, 2, 4])
@pytest.mark.parametrize(("window", "dilation"), [(7, 1), (11, 5), (3, 3), (4, 1), (4, 2), (1, 1)])
def test_a_convolution_along_time_sees_samples_wherever_they_lie(window: int, dilation: int, samples: int) -> None:
    layer = random_weights(Conv1d(Scope(jnp.float32), 3, 5, window, dilation), seed=0)
    x = normal(2, 24, 3)
    kernel, bias = (torch.from_numpy(np.array(weight[...])) for weight in (layer.kernel, layer.bias))
    around = dilation * (window - 1) // 2, dilation * (window - 1) - dilation * (window - 1) // 2
    wanted = torch.nn.functional.conv1d(
        torch.nn.functional.pad(torch.from_numpy(x).mT, around), kernel.permute(2, 1, 0), bias, dilation=dilation
    ).mT
    rows = layer(x.reshape(2, 24 // samples, samples * 3))
    assert rows.shape == (2, 24 // samples, samples * 5)
    np.testing.assert_allclose(rows.reshape(2, 24, 5), wanted, rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    ("channels", "window", "stride", "shape"),
    [
        ((192, 96), 4, 2, (48, 192)),
        ((256, 128), 4, 2, (96, 128)),
        ((128, 64), 4, 2, (24, 256)),
        ((32, 16), 5, 3, (9, 256)),
        ((32, 16), 5, 2, (97, 16)),
    ],
)
def test_samples_of_few_channels_lie_side_by_side_on_a_tpu(channels, window, stride, shape, monkeypatch) -> None:
    """Up to 256 channels in all; where each has its own vector, or one sample is left over, alone."""
    layer = random_weights(ConvTranspose1d(Scope(jnp.float32), *channels, window, stride), seed=0)
    x = normal(2, 48, channels[0])
    wanted = layer(x)
    monkeypatch.setattr(conv1d, "device", lambda: SimpleNamespace(platform="tpu"))
    for samples in (1, 2, 4):
        ours = layer(x.reshape(2, 48 // samples, samples * channels[0]))
        assert ours.shape == (2, *shape)
        np.testing.assert_allclose(ours.reshape(wanted.shape), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("samples", [1, 2, 4])
@pytest.mark.parametrize(("ratio", "window"), [(2, 12), (3, 13), (2, 5)])
def test_filters_see_samples_wherever_they_lie(samples: int, ratio: int, window: int) -> None:
    """As sums, by their definitions; the ends are repeated."""
    x, taps, lead = normal(2, 24, 3), normal(window), (window - ratio) // 2
    at = np.clip(np.arange(24)[:, None] * ratio + np.arange(window) - (window - 1) // 2, 0, 23)[: 24 // ratio]
    lower = np.einsum("bnkc,k->bnc", x[:, at], taps)
    rows = x.reshape(2, -1, samples * ratio * 3)
    np.testing.assert_allclose(downsample_1d(rows, taps, ratio, 3).reshape(lower.shape), lower, rtol=0, atol=1e-5)
    k = np.arange(24 * ratio)[:, None] + lead - ratio * np.arange(-9, 33)
    seen = np.where((k >= 0) & (k < window), taps[np.clip(k, 0, window - 1)], 0)
    higher = ratio * np.einsum("bmc,nm->bnc", np.pad(x, ((0, 0), (9, 9), (0, 0)), mode="edge"), seen)
    rows = upsample_1d(x.reshape(2, -1, samples * 3), taps, ratio, lead, 3)
    assert rows.shape == (2, 24 // samples, samples * ratio * 3)
    np.testing.assert_allclose(rows.reshape(higher.shape), higher, rtol=0, atol=1e-5)
