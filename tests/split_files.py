"""A checkpoint in diffusers' folder as the files that LTX-2.5 is published in."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from embedded_configs import native_config
from ltx2_cli.models.arch import Arch
from ltx2_cli.models.config import RENAMINGS
from ltx2_cli.weights.published import AUDIO_VAE_FILE, TEXT_ENCODER_FILE, VIDEO_VAE_FILE

GEMMA = "gemma4-12b-ltx-v1"
STATED = json.dumps({"ltx_version": "2.5.0", "gemma_version": GEMMA})
PROJECTION = "text_embedding_projection."


def split(folder: Path, arch: Arch, root: Path, name: str) -> Path:
    """Write the files below `root`; returns that of the denoiser, `name`."""
    stored = {}
    for network, renaming in RENAMINGS.items():
        tensors = load_file(folder / network / "diffusion_pytorch_model.safetensors")
        stored |= {theirs: tensors[ours] for ours, theirs in renaming.originals(tensors).items()}
    config = native_config(arch)
    text = {
        f"model.{name}": tensor for name, tensor in load_file(folder / "text_encoder" / "model.safetensors").items()
    }
    for tensor, file in (
        ("tokenizer_json", "tokenizer.json"),
        ("hf_asset__tokenizer_config.json", "tokenizer_config.json"),
    ):
        text[tensor] = np.frombuffer((folder / "tokenizer" / file).read_bytes(), np.uint8)
    text["vision_model.patch_dense.weight"] = np.zeros((2, 2), np.float32)
    text |= {name: tensor for name, tensor in stored.items() if name.startswith(PROJECTION)}
    denoiser = {name: tensor for name, tensor in stored.items() if name.startswith("model.diffusion_model.")}
    vae = {name.removeprefix("vae."): tensor for name, tensor in stored.items() if name.startswith("vae.")}
    audio = {name: tensor for name, tensor in stored.items() if name.startswith(("audio_vae.", "vocoder."))}
    gemma = {
        "model_type": "gemma4_unified",
        "gemma_version": GEMMA,
        "text_config": json.loads(arch.text_encoder.config),
    }
    sections = {key: json.dumps({key: config[key]}) for key in ("transformer", "vae")}
    sounds = json.dumps({key: config[key] for key in ("audio_vae", "vocoder")})
    metadata = {"config": sections["transformer"], "model_version": "2.5.0", "gemma_source_checkpoint": STATED}
    files = {
        f"diffusion_models/{name}": (denoiser, metadata),
        TEXT_ENCODER_FILE: (text, {"gemma_config": json.dumps(gemma)}),
        VIDEO_VAE_FILE: (vae, {"config": sections["vae"]}),
        AUDIO_VAE_FILE: (audio, {"config": sounds}),
    }
    for place, (tensors, stated) in files.items():
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, root / place, stated)
    return root / "diffusion_models" / name
