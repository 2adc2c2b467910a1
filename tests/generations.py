"""The embedded model's folder, in each generation's architecture."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ltx2_cli.models import demo
from ltx2_cli.models.arch import Arch, VideoVAEArch, VocoderArch
from ltx2_cli.models.gemma import Gemma, gemma_recipe
from ltx2_cli.weights.declare import Scope, random_weights
from ltx2_cli.weights.save import save

LTX2_3 = demo.ARCH
LTX2 = Arch(
    replace(
        LTX2_3.transformer,
        gated_attn=False,
        audio_gated_attn=False,
        cross_attn_mod=False,
        audio_cross_attn_mod=False,
        use_prompt_embeddings=True,
    ),
    replace(
        LTX2_3.connectors,
        video_connector_num_attention_heads=2,
        video_connector_num_layers=2,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=32,
        audio_connector_num_layers=2,
        video_gated_attn=False,
        audio_gated_attn=False,
        per_modality_projections=False,
        proj_bias=False,
    ),
    VideoVAEArch(
        latent_channels=16,
        block_out_channels=(16, 32, 64, 128),
        decoder_block_out_channels=(16, 32, 64),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        decoder_causal=False,
    ),
    LTX2_3.audio_vae,
    VocoderArch(hidden_channels=64),
    LTX2_3.scheduler,
)


def other_text_encoder(folder: Path, **changes: object) -> None:
    """A text encoder in itself sound, in a folder: the embedded model's with other values in its config."""
    config = demo.TEXT_CONFIG | changes
    recipe = gemma_recipe(config, str(folder))
    save(random_weights(Gemma(Scope("float32", demo.PREFIX), recipe), seed=0), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@contextmanager
def demo_folder(arch: Arch, cache: Path) -> Iterator[Path]:
    """The embedded model's folder as it would be if it were `arch`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setattr(demo, "ARCH", arch)
        yield demo.demo_checkpoint()
