"""LoRA files for tests: whole ones, and ones of real size that are a header before a hole."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from ltx2_cli.models.config import RENAMINGS
from ltx2_cli.weights.declare import Shape
from parity import published

BYTES = {"U8": 1, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I64": 8}


def write_header(
    path: Path,
    shapes: Mapping[str, Shape],
    metadata: Mapping[str, str] | None = None,
    dtype: str = "BF16",
    others: Mapping[str, str] | None = None,
) -> Path:
    """A safetensors file with these tensors whose data is a hole in the file: no disk is taken, and zeros are read, but
    for scales, each of which is 1.

    Those that `others` names have another dtype."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, shape in shapes.items():
        kind = (others or {}).get(name, dtype)
        begin, end = end, end + BYTES[kind] * int(np.prod(shape))
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for name in shapes:
            if name.endswith("weight_scale"):
                file.seek(8 + len(text) + header[name]["data_offsets"][0])
                file.write(np.float32(1).tobytes())
    return path


def write(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> Path:
    """A safetensors file with these tensors."""
    save_file(dict(tensors), path, metadata=dict(metadata) if metadata else None)
    return path


def factors(target: str, d_out: int, d_in: int, rank: int, seed: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Random A and B of one target, under the names of published files."""
    draw = np.random.default_rng(seed).standard_normal
    a, b = draw((rank, d_in)), draw((d_out, rank))
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return {f"{target}.lora_A.weight": a.astype(kind), f"{target}.lora_B.weight": b.astype(kind)}


def linears(table: str) -> dict[str, tuple[int, int]]:
    """Shapes (out, in) of a published network's linear layers, by the name without `.weight`."""
    shapes = published(table).items()
    return {
        name.removesuffix(".weight"): shape for name, shape in shapes if name.endswith(".weight") and len(shape) == 2
    }


def original(network: str, names: Iterable[str]) -> dict[str, str]:
    """The names of layers in the published single files."""
    named = RENAMINGS[network].originals([f"{name}.weight" for name in names])
    return {ours.removesuffix(".weight"): theirs.removesuffix(".weight") for ours, theirs in named.items()}


def keys(shapes: Mapping[str, tuple[int, int]], rank: int) -> dict[str, Shape]:
    """A and B of each target, of `rank` or the largest that it can have."""
    pairs: dict[str, Shape] = {}
    for name, (d_out, d_in) in shapes.items():
        least = min(rank, d_in, d_out)
        pairs |= {f"{name}.lora_A.weight": (least, d_in), f"{name}.lora_B.weight": (d_out, least)}
    return pairs


def distilled(model: str, prefix: str = "diffusion_model.") -> dict[str, Shape]:
    """The keys of the published LoRA that distils a model: every linear layer of its denoiser, rank 384 at most."""
    shapes = linears(f"{model}/transformer.tsv")
    names = original("transformer", shapes)
    return keys({names[name].replace("model.diffusion_model.", prefix): shape for name, shape in shapes.items()}, 384)


# Linear layers as published LoRAs call them, each with a rank; of three layers not all, and not all of the same rank.
ORIGINAL = {
    "diffusion_model.patchify_proj": 3,
    "diffusion_model.adaln_single.linear": 4,
    "diffusion_model.av_ca_a2v_gate_adaln_single.linear": 2,
    "diffusion_model.transformer_blocks.0.attn1.to_q": 2,
    "diffusion_model.transformer_blocks.2.attn1.to_q": 5,
    "diffusion_model.transformer_blocks.1.audio_attn2.to_out.0": 3,
    "diffusion_model.transformer_blocks.1.audio_to_video_attn.to_k": 1,
    "diffusion_model.transformer_blocks.2.ff.net.0.proj": 6,
    "diffusion_model.audio_proj_out": 2,
}
OF_2_0 = {"text_embedding_projection.aggregate_embed": 4, "diffusion_model.caption_projection.linear_1": 2}
OF_2_3 = {
    "diffusion_model.transformer_blocks.0.attn2.to_gate_logits": 2,
    "diffusion_model.prompt_adaln_single.linear": 3,
    "diffusion_model.audio_prompt_adaln_single.emb.timestep_embedder.linear_2": 2,
}
DIFFUSERS = {
    "transformer.transformer_blocks.0.attn1.to_q": 3,  # another of the same tensor
    "transformer.transformer_blocks.1.ff.net.2": 4,
    "transformer.audio_time_embed.linear": 2,
    "connectors.video_connector.transformer_blocks.0.attn1.to_v": 2,
}
IN_DIFFUSERS = {
    "diffusion_model.": "transformer.",
    "text_embedding_projection.aggregate_embed": "connectors.text_proj_in",
    "patchify_proj": "proj_in",
    ".adaln_single": ".time_embed",
    "av_ca_a2v_gate_adaln_single": "av_cross_attn_video_a2v_gate",
    "prompt_adaln_single": "prompt_adaln",
}


def write_lora(
    path: Path, pipeline: object, ranks: dict[str, int], seed: int, metadata: dict[str, str] | None = None
) -> Path:
    """A LoRA with random factors that fit the pipeline's layers."""
    normal, tensors = np.random.default_rng(seed).standard_normal, {}
    for name, rank in ranks.items():
        module = name
        for theirs, ours in IN_DIFFUSERS.items():
            module = module.replace(theirs, ours)
        network, _, place = module.partition(".")
        outward, inward = getattr(pipeline, network).get_submodule(place).weight.shape
        tensors[f"{name}.lora_A.weight"] = normal((rank, inward), np.float32) * np.float32(0.2)
        tensors[f"{name}.lora_B.weight"] = normal((outward, rank), np.float32) * np.float32(0.2)
    save_file(tensors, path, metadata)
    return path
