"""The configs in the metadata of single files: those published, by model version, LTX-2.3's own and LTX-2's after it;
and of other sizes."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ltx2_cli.models.arch import Arch
from ltx2_cli.models.config import LAYOUTS, LTX2_5
from ltx2_cli.models.vocoder import VocoderArch

LTX23 = json.loads((Path(__file__).parent / "keys" / "ltx2.3" / "embedded_config.json").read_text())
LATER = {  # keys of the transformer that LTX-2 does not have
    "apply_gated_attention",
    "audio_connector_attention_head_dim",
    "audio_connector_num_attention_heads",
    "caption_proj_before_connector",
    "caption_proj_input_norm",
    "caption_projection_first_linear",
    "caption_projection_second_linear",
    "connector_apply_gated_attention",
    "connector_learnable_registers_std",
    "cross_attention_adaln",
    "text_encoder_norm_type",
}
LTX2_RESIDUAL = ["res_x", {"num_layers": 5, "inject_noise": False}]
LTX2_UPSAMPLING = ["compress_all", {"residual": True, "multiplier": 2}]
LTX2 = LTX23 | {
    "transformer": {key: value for key, value in LTX23["transformer"].items() if key not in LATER}
    | {"connector_num_attention_heads": 30, "connector_num_layers": 2},
    "vae": {
        "_class_name": "CausalVideoAutoencoder",
        "dims": 3,
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 128,
        "encoder_blocks": [
            ["res_x", {"num_layers": 4}],
            ["compress_space_res", {"multiplier": 2}],
            ["res_x", {"num_layers": 6}],
            ["compress_time_res", {"multiplier": 2}],
            ["res_x", {"num_layers": 6}],
            ["compress_all_res", {"multiplier": 2}],
            ["res_x", {"num_layers": 2}],
            ["compress_all_res", {"multiplier": 2}],
            ["res_x", {"num_layers": 2}],
        ],
        "decoder_blocks": [*[LTX2_RESIDUAL, LTX2_UPSAMPLING] * 3, LTX2_RESIDUAL],
        "norm_layer": "pixel_norm",
        "patch_size": 4,
        "latent_log_var": "uniform",
        "causal_decoder": False,
        "timestep_conditioning": False,
    },
    "vocoder": {
        "upsample_initial_channel": 1024,
        "resblock": "1",
        "upsample_rates": [6, 5, 2, 2, 2],
        "upsample_kernel_sizes": [16, 15, 8, 4, 4],
        "resblock_kernel_sizes": [3, 7, 11],
        "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
        "stereo": True,
    },
}
NATIVE = {"ltx2": LTX2, "ltx2.3": LTX23}


def native_config(arch: Arch) -> dict[str, Any]:
    """The published config of its model version, in its sizes."""
    published = NATIVE[LAYOUTS.get(arch.model_version, arch.model_version)]
    vocoder: dict[str, Any] = _generator(arch.vocoder)
    if "bwe" in published["vocoder"]:
        sections = {"vocoder": vocoder, "bwe": _generator(arch.vocoder.bwe)}
        vocoder = {name: published["vocoder"][name] | section for name, section in sections.items()}
    ddconfig = {
        "ch": arch.audio_vae.base_channels,
        "ch_mult": arch.audio_vae.ch_mult,
        "num_res_blocks": arch.audio_vae.num_res_blocks,
        "z_channels": arch.audio_vae.latent_channels,
    }
    params = published["audio_vae"]["model"]["params"]
    audio_vae = {"model": {"params": params | {"ddconfig": params["ddconfig"] | ddconfig}}}
    return {
        "transformer": published["transformer"] | _transformer(arch),
        "vae": published["vae"] | _vae(arch, published["vae"]),
        "audio_vae": published["audio_vae"] | audio_vae,
        "vocoder": published["vocoder"] | vocoder,
    }


def _transformer(arch: Arch) -> dict[str, Any]:
    denoiser, (video, audio) = arch.transformer, arch.connectors.connectors
    later = {"audio_connector_num_attention_heads": audio.heads, "audio_connector_attention_head_dim": audio.head_dim}
    return {
        "num_layers": denoiser.num_layers,
        "num_attention_heads": denoiser.num_attention_heads,
        "attention_head_dim": denoiser.attention_head_dim,
        "cross_attention_dim": denoiser.cross_attention_dim,
        "in_channels": denoiser.in_channels,
        "out_channels": denoiser.out_channels,
        "caption_channels": denoiser.caption_channels,
        "audio_num_attention_heads": denoiser.audio_num_attention_heads,
        "audio_attention_head_dim": denoiser.audio_attention_head_dim,
        "audio_cross_attention_dim": denoiser.audio_cross_attention_dim,
        "audio_out_channels": denoiser.audio_out_channels,
        "connector_num_layers": video.layers,
        "connector_num_learnable_registers": video.registers,
        "connector_num_attention_heads": video.heads,
        "connector_attention_head_dim": video.head_dim,
        **(later if audio != video else {}),
        **({"ff_bias": False, "use_keyframes_abs_pos_embedding": True} if denoiser.model_version == LTX2_5 else {}),
    }


def _vae(arch: Arch, published: dict[str, Any]) -> dict[str, Any]:
    vae = arch.vae
    base = vae.decoder_block_out_channels[0] // vae.upsample_factor[0]
    widths = (vae.latent_channels, *vae.block_out_channels)
    factors = [deep // shallow for shallow, deep in pairwise(widths)]
    return {
        "latent_channels": vae.latent_channels,
        "encoder_base_channels": vae.latent_channels,
        "decoder_base_channels": base,
        "encoder_blocks": _blocks(published["encoder_blocks"], vae.layers_per_block, factors),
        "decoder_blocks": _blocks(published["decoder_blocks"], vae.decoder_layers_per_block, vae.upsample_factor),
    }


def _blocks(published: Sequence[Any], layers: Sequence[int], factors: Sequence[int]) -> list[Any]:
    """Levels and what lies between them, in turn."""
    sizes = [
        {"num_layers": layers[place // 2]} if place % 2 == 0 else {"multiplier": factors[place // 2]}
        for place in range(len(published))
    ]
    return [[kind, options | size] for (kind, options), size in zip(published, sizes, strict=True)]


def _generator(vocoder: VocoderArch) -> dict[str, Any]:
    return {
        "upsample_initial_channel": vocoder.hidden_channels,
        "upsample_rates": vocoder.upsample_factors,
        "upsample_kernel_sizes": vocoder.upsample_kernel_sizes,
        "resblock_kernel_sizes": vocoder.resnet_kernel_sizes,
        "resblock_dilation_sizes": vocoder.resnet_dilations,
    }
