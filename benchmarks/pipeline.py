"""The whole pipeline, from files to frames and audio, each side in a process of its own: seconds and peak memory.

`python -m benchmarks.pipeline SIDE FOLDER`, of `ours` and `theirs`, makes one clip and prints the most bytes that the
process held.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.loading import most_resident

if TYPE_CHECKING:
    from diffusers import LTX2Pipeline

Config = dict[str, Any]

# 1.3 GB of weights in float32: enough to count beside what the interpreters take.
TEXT_ENCODER: Config = {
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 96,
}
NO_SIGHT: Config = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 14,
}
CONNECTORS: Config = {
    "caption_channels": 768,
    "text_proj_in_factor": 9,
    "video_connector_num_attention_heads": 8,
    "video_connector_attention_head_dim": 96,
    "video_connector_num_layers": 1,
    "audio_connector_num_attention_heads": 8,
    "audio_connector_attention_head_dim": 96,
    "audio_connector_num_layers": 1,
    "rope_type": "split",
}
TRANSFORMER: Config = {
    "num_attention_heads": 16,
    "attention_head_dim": 64,
    "cross_attention_dim": 1024,
    "audio_num_attention_heads": 16,
    "audio_attention_head_dim": 32,
    "audio_cross_attention_dim": 512,
    "num_layers": 6,
    "caption_channels": 768,
    "rope_type": "split",
}
VIDEO_VAE: Config = {
    "block_out_channels": (64, 128, 256, 512),
    "decoder_block_out_channels": (64, 128, 256),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (2, 2, 2, 2),
    "decoder_causal": False,
    "spatial_compression_ratio": 32,
    "temporal_compression_ratio": 8,
}
VOCODER: Config = {"hidden_channels": 256}
CLIP: Config = {
    "prompt": "A brass music box opens by itself on a window sill",
    "negative_prompt": "blurry",
    "num_frames": 33,
    "height": 256,
    "width": 256,
    "num_inference_steps": 4,
    "max_sequence_length": 256,
}


PARTS: dict[str, Config] = {
    "text_encoder": TEXT_ENCODER,
    "connectors": CONNECTORS,
    "transformer": TRANSFORMER,
    "vae": VIDEO_VAE,
    "audio_vae": {},
    "vocoder": VOCODER,
    "scheduler": {"use_dynamic_shifting": True, "shift_terminal": 0.1},
}


def build(folder: Path, parts: Mapping[str, Config]) -> "LTX2Pipeline":
    """A pipeline of diffusers with parts of these configs, their weights as they come; its tokenizer is in `folder`."""
    from diffusers import (
        AutoencoderKLLTX2Audio,
        AutoencoderKLLTX2Video,
        FlowMatchEulerDiscreteScheduler,
        LTX2Pipeline,
        LTX2VideoTransformer3DModel,
    )
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE
    from transformers import (
        AutoTokenizer,
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma4UnifiedConfig,
        Gemma4UnifiedForConditionalGeneration,
    )

    from benchmarks.spelling import byte_tokenizer

    byte_tokenizer(folder / "tokenizer")
    if "global_head_dim" in parts["text_encoder"]:
        whole = Gemma4UnifiedConfig(text_config=parts["text_encoder"])
        text_encoder = Gemma4UnifiedForConditionalGeneration(whole)
    else:
        whole = Gemma3Config(text_config=parts["text_encoder"], vision_config=NO_SIGHT, mm_tokens_per_image=1)
        text_encoder = Gemma3ForConditionalGeneration(whole)
    vocoder = LTX2VocoderWithBWE if "bwe_in_channels" in parts["vocoder"] else LTX2Vocoder
    return LTX2Pipeline(
        tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        scheduler=FlowMatchEulerDiscreteScheduler(**parts["scheduler"]),
        text_encoder=text_encoder,
        connectors=LTX2TextConnectors(**parts["connectors"]),
        transformer=LTX2VideoTransformer3DModel(**parts["transformer"]),
        vae=AutoencoderKLLTX2Video(**parts["vae"]),
        audio_vae=AutoencoderKLLTX2Audio(**parts["audio_vae"]),
        vocoder=vocoder(**parts["vocoder"]),
    )


def ours(folder: Path) -> None:
    """One clip by this project, which keeps its programs beside the checkpoint."""
    from ltx2_cli import load, read_spec, resolve, run

    guidance = {
        f"guidance.{stream}.{name}": value
        for stream in ("video", "audio")
        for name, value in zip(("guidance_scale", "stg_scale", "modality_scale"), (3.0, 0.0, 1.0), strict=True)
    }
    asked = {**CLIP, **guidance, "dtype": "float32", "text_encoder_dtype": "float32", "model": str(folder)}
    plan = resolve(read_spec({**asked, "seed": 0, "compile_cache": str(folder / "programs")}))
    shutil.rmtree(folder / "programs" / "contexts", ignore_errors=True)  # each clip's text is encoded, as theirs is
    (media,) = run(plan, load(plan))
    assert media.frames.shape == (CLIP["num_frames"], CLIP["height"], CLIP["width"], 3)


def theirs(folder: Path) -> None:
    """The same clip by diffusers."""
    import torch
    from diffusers import LTX2Pipeline

    pipeline = LTX2Pipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    scales = {"guidance_scale": 3.0, "stg_scale": 0.0, "modality_scale": 1.0}
    audio = {"audio_guidance_scale": 3.0, "audio_stg_scale": 0.0, "audio_modality_scale": 1.0}
    generator = torch.Generator().manual_seed(0)
    video, _ = pipeline(**CLIP, **scales, **audio, generator=generator, output_type="np", return_dict=False)
    assert video.shape == (1, CLIP["num_frames"], CLIP["height"], CLIP["width"], 3)


SIDES: dict[str, Callable[[Path], None]] = {"ours": ours, "theirs": theirs}


def measure(side: str, folder: Path) -> tuple[float, float]:
    """Seconds of a process that makes one clip from the checkpoint in `folder`, and the most GB that it held."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.pipeline", side, str(folder)]
    done = subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - began, int(done.stdout) / 1e9


if __name__ == "__main__":
    SIDES[sys.argv[1]](Path(sys.argv[2]))
    print(most_resident())
