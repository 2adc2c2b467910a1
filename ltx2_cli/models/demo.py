"""The embedded model: LTX-2.3's architecture at a tiny size, with untrained weights made from a fixed seed.

It is written once, as an ordinary checkpoint folder, to the user's cache, and then loaded like any other.
"""

import hashlib
import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import mkdtemp

from ltx2_cli import __version__
from ltx2_cli.models.arch import PUBLISHED_SCHEDULE, Arch, AudioVAEArch, BandwidthVocoderArch
from ltx2_cli.models.folder import CONFIG, SCHEDULER
from ltx2_cli.models.gemma import Gemma, gemma_recipe
from ltx2_cli.models.networks import abstract_networks
from ltx2_cli.models.published import LTX2_3
from ltx2_cli.models.tokenizer import BYTE_VOCABULARY, byte_tokenizer
from ltx2_cli.models.upsampler import LatentUpsampler, LatentUpsamplerArch
from ltx2_cli.profiles import user_cache
from ltx2_cli.spec import DType, RunError, SpecError
from ltx2_cli.weights.declare import Scope, random_weights
from ltx2_cli.weights.published import UPSAMPLER
from ltx2_cli.weights.save import save

EMBEDDED = "embedded"  # what a request calls this checkpoint
UNTRAINED = "the embedded model is untrained: the clip shows and sounds like coloured noise"
SEED = 2
PREFIX = "language_model.model"

TEXT_CONFIG = {
    "model_type": "gemma3_text",
    "vocab_size": BYTE_VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 1024,
    "sliding_window_pattern": 2,
    "max_position_embeddings": 1024,
}
ARCH = Arch(
    replace(
        LTX2_3.transformer,
        in_channels=16,
        out_channels=16,
        num_attention_heads=4,
        attention_head_dim=32,
        cross_attention_dim=128,
        audio_in_channels=32,
        audio_out_channels=32,
        audio_num_attention_heads=4,
        audio_attention_head_dim=16,
        audio_cross_attention_dim=64,
        num_layers=4,
        caption_channels=64,
    ),
    replace(
        LTX2_3.connectors,
        caption_channels=64,
        text_proj_in_factor=4,
        video_connector_num_attention_heads=4,
        video_connector_attention_head_dim=32,
        video_connector_num_layers=3,
        video_connector_num_learnable_registers=32,
        audio_connector_num_attention_heads=4,
        audio_connector_attention_head_dim=16,
        audio_connector_num_layers=3,
        audio_connector_num_learnable_registers=32,
        video_hidden_dim=128,
        audio_hidden_dim=64,
    ),
    replace(
        LTX2_3.video_vae,
        latent_channels=16,
        block_out_channels=(16, 32, 64, 64),
        decoder_block_out_channels=(16, 32, 32, 64),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
    ),
    AudioVAEArch(base_channels=16, num_res_blocks=1, latent_channels=2),
    BandwidthVocoderArch(
        hidden_channels=64,
        upsample_kernel_sizes=(20, 32),
        upsample_factors=(10, 16),
        resnet_kernel_sizes=(3,),
        resnet_dilations=((3,),),
        bwe_hidden_channels=32,
        bwe_upsample_kernel_sizes=(31, 32),
        bwe_upsample_factors=(15, 16),
        bwe_resnet_kernel_sizes=(3,),
        bwe_resnet_dilations=((3,),),
    ),
    PUBLISHED_SCHEDULE,
)
UPSAMPLER_ARCH = LatentUpsamplerArch(
    in_channels=16, mid_channels=32, num_blocks_per_stage=1, use_rational_resampler=False
)


def demo_checkpoint() -> Path:
    """The folder of the embedded model, made at the first call; raises `SpecError` where the cache cannot hold it."""
    cache = user_cache()
    described = repr((ARCH, UPSAMPLER_ARCH, TEXT_CONFIG, SEED)).encode()
    folder = cache / f"demo-{__version__}-{hashlib.sha256(described).hexdigest()[:12]}"
    try:
        if not folder.is_dir():
            _make(folder)
    except (OSError, RunError) as error:
        raise SpecError(
            f"the embedded model cannot be kept in {cache}: {error}",
            "make room there, or set XDG_CACHE_HOME to a folder that can be written",
        ) from error
    return folder


def _make(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(mkdtemp(prefix=".demo-", dir=folder.parent))
    try:
        _write(made)
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():  # else another process was first; its folder is the same
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write(folder: Path) -> None:
    recipe = gemma_recipe(TEXT_CONFIG, "the embedded model")
    networks = abstract_networks(ARCH, Gemma(Scope("float32", PREFIX), recipe), DType.float32)
    modules = {**networks.present(), UPSAMPLER: LatentUpsampler(Scope("float32"), UPSAMPLER_ARCH)}
    for index, (name, module) in enumerate(modules.items()):
        save(random_weights(module, seed=SEED + index), folder / name / "model.safetensors")
    configs = {
        "text_encoder": TEXT_CONFIG,
        "transformer": asdict(ARCH.transformer) | ARCH.transformer.only,
        "connectors": asdict(ARCH.connectors) | ARCH.connectors.only,
        "vae": asdict(ARCH.video_vae) | ARCH.video_vae.only,
        "audio_vae": asdict(ARCH.audio_vae) | ARCH.audio_vae.only,
        "vocoder": asdict(ARCH.vocoder) | ARCH.vocoder.only,
        UPSAMPLER: asdict(UPSAMPLER_ARCH) | UPSAMPLER_ARCH.only,
    }
    for name, config in configs.items():
        (folder / name / CONFIG).write_text(json.dumps(config, indent=2))
    (folder / SCHEDULER).parent.mkdir()
    (folder / SCHEDULER).write_text(json.dumps(asdict(ARCH.scheduler) | ARCH.scheduler.only, indent=2))
    byte_tokenizer(folder / "tokenizer")
