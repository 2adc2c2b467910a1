"""Networks as an ordinary checkpoint: a folder in diffusers' layout."""

import json
from dataclasses import asdict
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from ltx2_cli.models.arch import Arch
from ltx2_cli.models.config import Config, NetworkArch
from ltx2_cli.models.networks import TEXT_ENCODER
from ltx2_cli.models.video_vae import VideoVAEArch
from ltx2_cli.models.vocoder import VocoderWithBWEArch
from ltx2_cli.plan.request_warnings import TRAINED_ON_FILE
from ltx2_cli.weights.declare import M, map_weights
from ltx2_cli.weights.published import UPSAMPLER
from tools.train_demo.arch import UPSAMPLER_ARCH
from tools.train_demo.clips import TRAINING_CLIPS
from tools.train_demo.words import write_tokenizer
from tools.train_demo.world import FPS, NUM_FRAMES
from tools.weights import save


def ship(networks: dict[str, nnx.Module], arch: Arch, folder: Path) -> None:
    """Write `networks`, by the names of their folders, as they are, and all that stands beside them."""
    extended = isinstance(arch.vocoder, VocoderWithBWEArch)
    configs = {
        TEXT_ENCODER: json.loads(arch.text_encoder.config),
        "connectors": _config("LTX2TextConnectors", arch.connectors),
        "transformer": _config("LTX2VideoTransformer3DModel", arch.transformer),
        "vae": _config("AutoencoderKLLTX2Video", arch.vae) | _for_each_stage(arch.vae),
        "audio_vae": _config("AutoencoderKLLTX2Audio", arch.audio_vae),
        "vocoder": _config("LTX2VocoderWithBWE" if extended else "LTX2Vocoder", arch.vocoder),
        UPSAMPLER: _config("LTX2LatentUpsamplerModel", UPSAMPLER_ARCH),
    }
    scheduler = _config("FlowMatchEulerDiscreteScheduler", arch.scheduler)
    for name, network in networks.items():
        stem = "model" if name == TEXT_ENCODER else "diffusion_pytorch_model"
        save(network, folder / name / f"{stem}.safetensors")
        _write(configs[name], folder / name / "config.json")
    _write(scheduler, folder / "scheduler" / "scheduler_config.json")
    _write(_index(configs, scheduler), folder / "model_index.json")
    write_tokenizer(folder / "tokenizer")


def write_trained_on(folder: Path) -> None:
    """Write the sizes, lengths and frame rates of the training clips."""
    sizes = [f"{pixels}x{pixels}" for pixels in TRAINING_CLIPS]
    _write({"sizes": sizes, "num_frames": [NUM_FRAMES], "fps": [FPS]}, folder / TRAINED_ON_FILE)


def rounded(network: M) -> M:
    """`network` in bfloat16."""
    return map_weights(lambda weight: weight.with_value(weight.get_value().astype(jnp.bfloat16)), network)


def _config(name: str, arch: NetworkArch) -> Config:
    return {"_class_name": name} | asdict(arch) | arch.only


def _for_each_stage(arch: VideoVAEArch) -> Config:
    """What diffusers wants of each stage, by default of as many as the first model version has."""
    down, up = len(arch.block_out_channels), len(arch.decoder_block_out_channels)
    stages = {
        "down_block_types": down,
        "spatio_temporal_scaling": down,
        "decoder_spatio_temporal_scaling": up,
        "decoder_inject_noise": up + 1,
    }
    return {key: [arch.only[key]] * count for key, count in stages.items()}


def _index(configs: dict[str, Config], scheduler: Config) -> Config:
    """Where diffusers' pipeline finds the class of each of its parts."""
    places = {"connectors": "ltx2", "vocoder": "ltx2"}
    names = [name for name in configs if name not in (TEXT_ENCODER, UPSAMPLER)]
    return {
        "_class_name": "LTX2Pipeline",
        TEXT_ENCODER: ["transformers", *configs[TEXT_ENCODER]["architectures"]],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "scheduler": ["diffusers", scheduler["_class_name"]],
        **{name: [places.get(name, "diffusers"), configs[name]["_class_name"]] for name in names},
    }


def _write(config: Config, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=2) + "\n")
