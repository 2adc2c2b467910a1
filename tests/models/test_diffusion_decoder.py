"""The network of the diffusion decoder, beside diffusers'."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import LTX2VideoDiffusionDecoderModel
from jax.sharding import SingleDeviceSharding
from torch.nn.attention import flex_attention

from compilers import needs_libtpu
from ltx2_cli.errors import UsageError
from ltx2_cli.estimate.offline import topology
from ltx2_cli.models import diffusion_decoder
from ltx2_cli.models.config import read_arch
from ltx2_cli.models.diffusion_decoder import (
    DiffusionDecoder,
    DiffusionDecoderArch,
    NeighborhoodAttention,
    from_patches,
)
from ltx2_cli.weights.declare import Scope, declared
from parity import adopt, randomise, relative_error

TINY = {
    "latent_channels": 6,
    "patch_size": 2,
    "decoder_head_dim": 16,
    "decoder_stage_channels": (64, 32, 32, 32, 16),
    "decoder_stage_depths": (1, 1, 1, 1, 2),
    "decoder_stage_kernels": ((3, 3, 5), (3, 5, 3), (3, 5, 5), (3, 3, 5)),
    "decoder_upsample_strides": ((1, 2, 2), (2, 1, 1), (2, 2, 2), (2, 1, 1)),
    "decoder_upsample_channel_reductions": (2, 1, 1, 2),
    "decoder_stage5_kernel": (11, 7, 5),
    "decoder_t_emb_dim": 24,
    "decoder_timestep_scale_multiplier": 900.0,
}

TINY |= {"spatial_compression_ratio": 8}
features, pixels = jax.jit(DiffusionDecoder.features), jax.jit(DiffusionDecoder.pixels)


def channels_first(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1)))


def test_names_and_shapes_of_the_published_size_equal_those_of_the_reference():
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in LTX2VideoDiffusionDecoderModel().state_dict().items()}
    assert declared(DiffusionDecoder(Scope(jnp.bfloat16), DiffusionDecoderArch())) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "steps"),
    [((2, 1, 3, 5, 6), 3), ((1, 3, 3, 5, 6), 1)],
    ids=["three steps of frames that ghosts fill up", "one step of several blocks of queries"],
)
def test_decoded_pixels_equal_the_reference(shape, steps, monkeypatch: pytest.MonkeyPatch):
    """The first grid is as small as its window, the last has several blocks of queries along each axis."""
    # torch's compiler fails where torchax was imported; without it the reference computes the same
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(diffusion_decoder, "PART_TOKENS", 100)  # several parts
    reference = randomise(LTX2VideoDiffusionDecoderModel(**TINY), seed=1)
    arch = read_arch(DiffusionDecoderArch, TINY | {"decoder_num_inference_steps": steps}, "here")
    ours = adopt(DiffusionDecoder(Scope(jnp.float32), arch), reference.state_dict())
    random = np.random.default_rng(5)
    latents = random.normal(size=shape).astype(np.float32)
    grid = arch.tokens(arch.cells(shape[1:4]))
    noise = random.normal(size=(shape[0], *grid, arch.patch_features)).astype(np.float32)
    mean, std = (x.view(-1, 1, 1, 1) for x in (reference.latents_mean, reference.latents_std))
    network = reference.decoder
    with torch.no_grad():
        cells = network.forward_stages_1_to_3(channels_first(latents) * std + mean)
        context = network.forward_stage_4(cells, crop_trailing_ghost=False)[:, : grid[0]]
        drawn = channels_first(np.asarray(from_patches(jnp.asarray(noise), arch.patch_size)))
        wanted = network.denoise(context, drawn, steps)[:, :, : 8 * shape[1] - 7]
    got = pixels(ours, features(ours, latents), noise)
    assert relative_error(np.moveaxis(got, -1, 1), wanted) < 1e-4


@pytest.mark.slow
@needs_libtpu
def test_tpus_copy_no_grid_for_each_block():
    """XLA for v7x did so with the values, inside the loop over blocks."""
    place, frames, height, width = SingleDeviceSharding(topology("tpu7x:2x2x1")[0]), 25, 32, 48
    attention = NeighborhoodAttention(Scope(jnp.bfloat16), 256, (11, 11, 11), 64)
    x = jax.ShapeDtypeStruct((1, frames, height, width, 256), jnp.bfloat16)
    given = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), (attention, x))
    text = jax.jit(lambda attention, x: attention(x)).lower(*given).compile().as_text()
    assert "fusion(" in text
    assert not re.findall(rf"= bf16\[1,\d+,{height},{width},256\]\S* copy\(.*", text)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"decoder_model_output_type": "velocity"}, "decoder_model_output_type is 'velocity', only 'x0' is"),
        ({"decoder_stage_depths": (1, 1)}, "the decoder's lists differ in length"),
        ({"decoder_stage_channels": (64, 32, 32, 32, 32)}, "do not shrink by decoder_upsample_channel_reductions"),
        ({"decoder_head_dim": 24}, "decoder_head_dim does not divide decoder_stage_channels"),
        ({"decoder_upsample_strides": ((1, 2, 2), (4, 1, 1), (2, 2, 1), (1, 1, 1))}, "frames other than 1 and 2"),
        ({"spatial_compression_ratio": 16}, "decoder_upsample_strides and the compression ratios differ"),
    ],
)
def test_another_decoder_is_refused(changed, said):
    with pytest.raises(UsageError, match=said):
        read_arch(DiffusionDecoderArch, TINY | changed, "here")


def test_the_smallest_clip_of_the_published_decoder():
    """Seven latents along each side: 3·7·7 cells in the window of the first stage."""
    assert DiffusionDecoderArch().smallest == (224, 224)
