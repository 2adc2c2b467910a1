"""Diffusion decoders of diffusers with random weights, their decoding with given noise, and the names of the published
file."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from diffusers import LTX2VideoDiffusionDecoderModel
from diffusers.models.autoencoders import ltx2_diffusion_decoder
from safetensors.torch import save_file
from torch.nn.attention import flex_attention

from ltx2_cli.weights.published import DIFFUSION_DECODER_FILE
from parity import randomise

TINY: dict[str, Any] = {
    "latent_channels": 32,
    "decoder_head_dim": 8,
    "decoder_stage_channels": (32, 16, 16, 16, 8),
    "decoder_stage_depths": (1, 1, 1, 1, 2),
    "decoder_stage_kernels": ((3, 3, 3), (3, 3, 5), (3, 3, 3), (3, 3, 3)),
    "decoder_upsample_channel_reductions": (2, 1, 1, 2),
    "decoder_stage5_kernel": (3, 5, 3),
    "decoder_t_emb_dim": 24,
}


def diffusion_decoder(**sizes: Any) -> LTX2VideoDiffusionDecoderModel:
    """A decoder with every parameter random."""
    decoder = LTX2VideoDiffusionDecoderModel(**(TINY | sizes)).eval()
    return randomise(decoder, 8)


def decoded(decoder: LTX2VideoDiffusionDecoderModel, latents: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Pixels [batch, frames, height, width, 3] of normalised latents [batch, frames, height, width, channels], and of
    noise that has the shape of the pixels."""
    mean, std = (x.view(-1, 1, 1, 1) for x in (decoder.latents_mean, decoder.latents_std))
    canvas = _channels_first(noise)
    # torch's compiler fails where torchax was imported; without it the reference computes the same
    uncompiled = patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", new=True)

    def drawn(shape: tuple[int, ...], **_: object) -> torch.Tensor:
        assert tuple(canvas.shape) == tuple(shape)
        return canvas

    with torch.no_grad(), uncompiled, patch.object(ltx2_diffusion_decoder, "randn_tensor", drawn):
        pixels = decoder.decode(_channels_first(latents) * std + mean).sample
    return np.moveaxis(pixels.numpy(), 1, -1)


def _channels_first(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1)))


def write_published(decoder: LTX2VideoDiffusionDecoderModel, root: Path, outer: str = "") -> Path:
    """The file of a decoder among those of LTX-2.5: fused projections, factors of branches, and tensors that plain
    decoding does not read. All names begin with `outer`."""
    weights, random = dict(decoder.state_dict()), torch.Generator().manual_seed(2)
    for name in [name for name in weights if ".attn.to_q." in name]:
        parts = [weights.pop(name.replace("to_q", f"to_{part}")) for part in "qkv"]
        weights[name.replace("to_q", "qkv")] = torch.cat(parts)
    branches = {"msa": ("attn.to_out.0.weight", "attn.to_out.0.bias"), "mlp": ("mlp.w_down.weight",)}
    branches["ctx"] = ("context_proj.weight", "context_proj.bias")
    for block in {name.partition(".attn.")[0] for name in weights if "diff_blocks" in name and ".attn." in name}:
        for branch, folded in branches.items():
            gate = torch.rand(weights[f"{block}.{folded[0]}"].shape[0], generator=random) + 0.5
            weights[f"{block}.gate_{branch}"] = gate
            for name in folded:
                weights[f"{block}.{name}"] /= gate[:, None] if name.endswith("weight") else gate
    for ours, theirs in (
        ("latents_mean", "per_channel_statistics.mean-of-means"),
        ("latents_std", "per_channel_statistics.std-of-means"),
        ("timestep_embedder.linear_1", "mlp.0"),
        ("timestep_embedder.linear_2", "mlp.2"),
        ("attn.to_out.0", "attn.proj"),
        ("attn.norm_q", "attn.q_norm"),
        ("attn.norm_k", "attn.k_norm"),
    ):
        weights = {name.replace(ours, theirs): tensor for name, tensor in weights.items()}
    weights |= {name: torch.zeros(3) for name in ("decoder.type_emb", "decoder.coarse_in.weight", "encoder.conv_in.x")}
    place = root / DIFFUSION_DECODER_FILE
    place.parent.mkdir(parents=True, exist_ok=True)
    save_file({outer + name: tensor.contiguous() for name, tensor in weights.items()}, place)
    return place
