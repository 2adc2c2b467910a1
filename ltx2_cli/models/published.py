"""What the published networks are, so that a run can be planned before anything of them is here."""

from functools import cache
from pathlib import Path

from ltx2_cli.errors import UsageError
from ltx2_cli.models.arch import (
    PUBLISHED_SCHEDULE,
    Arch,
    AudioVAEArch,
    ConnectorsArch,
    TransformerArch,
    VideoVAEArch,
    VocoderArch,
    VocoderWithBWEArch,
)
from ltx2_cli.models.config import LTX2, LTX2_3
from ltx2_cli.models.gemma import gemma_arch
from ltx2_cli.models.lora import WEIGHT, linears
from ltx2_cli.models.networks import TEXT_ENCODER, Checkpoint
from ltx2_cli.models.parsed_checkpoint import ParsedCheckpoint
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.models.upsampler import LatentUpsamplerArch
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.lora import LoraFile, LoraPair
from ltx2_cli.weights.published import CATALOG, LORA, MODEL

# Gemma-3 12B, the language model alone; what is left out is transformers' default.
GEMMA = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
}
LTX2_ARCH = Arch(
    TransformerArch(),
    ConnectorsArch(),
    VideoVAEArch(decoder_causal=False),
    AudioVAEArch(),
    VocoderArch(),
    PUBLISHED_SCHEDULE,
)
LTX2_3_ARCH = Arch(
    TransformerArch(
        gated_attn=True,
        cross_attn_mod=True,
        audio_gated_attn=True,
        audio_cross_attn_mod=True,
        use_prompt_embeddings=False,
        perturbed_attn=True,
    ),
    ConnectorsArch(
        video_connector_num_attention_heads=32,
        video_connector_num_layers=8,
        audio_connector_num_attention_heads=32,
        audio_connector_attention_head_dim=64,
        audio_connector_num_layers=8,
        video_gated_attn=True,
        audio_gated_attn=True,
        per_modality_projections=True,
        proj_bias=True,
    ),
    VideoVAEArch(
        block_out_channels=(256, 512, 1024, 1024),
        decoder_block_out_channels=(256, 512, 512, 1024),
        layers_per_block=(4, 6, 4, 2, 2),
        decoder_layers_per_block=(4, 6, 4, 2, 2),
        upsample_type=("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
        upsample_residual=(False, False, False, False),
        upsample_factor=(2, 2, 1, 2),
        decoder_causal=False,
        decoder_spatial_padding_mode="zeros",
    ),
    AudioVAEArch(),
    VocoderWithBWEArch(),
    PUBLISHED_SCHEDULE,
)
_TWICE = LatentUpsamplerArch(use_rational_resampler=False)
_DENSER = LatentUpsamplerArch(mid_channels=512, spatial_upsample=False, temporal_upsample=True)
UPSAMPLERS = {
    "Lightricks/LTX-2/ltx-2-spatial-upscaler-x2-1.0.safetensors": LatentUpsamplerArch(),
    "Lightricks/LTX-2/ltx-2-temporal-upscaler-x2-1.0.safetensors": _DENSER,
    "Lightricks/LTX-2.3/ltx-2.3-spatial-upscaler-x2-1.0.safetensors": _TWICE,
    "Lightricks/LTX-2.3/ltx-2.3-spatial-upscaler-x2-1.1.safetensors": _TWICE,
    "Lightricks/LTX-2.3/ltx-2.3-spatial-upscaler-x1.5-1.0.safetensors": LatentUpsamplerArch(rational_spatial_scale=1.5),
    "Lightricks/LTX-2.3/ltx-2.3-temporal-upscaler-x2-1.0.safetensors": _DENSER,
}
DISTILLING, RANK = "distilled-lora-384", 384  # in the names of LoRAs, and their rank
PRESETS = {LTX2: LTX2_ARCH, LTX2_3: LTX2_3_ARCH}


@cache
def preset_checkpoint(checkpoint: str) -> Checkpoint:
    """A published checkpoint as its configs have it, without tensors; raises `UsageError` for one that is unknown."""
    name = checkpoint.partition("@")[0]
    for entry in CATALOG:
        if (entry.kind, entry.name) == (MODEL, name):
            arch, where = PRESETS[entry.model_version.lower().replace("-", "")], Path(checkpoint)
            return Checkpoint(where, arch, gemma_arch(GEMMA, checkpoint), "", {}, where / "tokenizer")
    raise UsageError(
        f"{checkpoint} is not on this machine, and what its networks are stands in its files alone",
        "fetch it first, or plan one that `ltx2 models` lists: --model ltx2, --model ltx2.3",
    )


def preset_text_encoder() -> ParsedCheckpoint:
    """The published text encoder by its config alone."""
    arch = gemma_arch(GEMMA, TEXT_ENCODER)
    return ParsedCheckpoint(Path(TEXT_ENCODER), {TEXT_ENCODER: arch}, {}, "", Path(TEXT_ENCODER), [])


def preset_upsampler(name: str) -> LatentUpsamplerArch:
    """A published upsampler; raises `UsageError` for one that is not known here."""
    if (known := UPSAMPLERS.get(name.partition("@")[0])) is None:
        raise UsageError(
            f"{name} is not on this machine, and what it makes of a clip stands in its file alone",
            f"--upsampler of a file that is here, or one of: {', '.join(UPSAMPLERS)}",
        )
    return known


def preset_lora(name: str, transformer: Transformer) -> LoraFile:
    """A published LoRA that distills: factors for every linear layer of the denoiser, as large as the rank or the
    layer allows. It has no tensors. Raises `UsageError` for one that is not known here."""
    known = [entry.name for entry in CATALOG if entry.kind == LORA and DISTILLING in entry.name]
    if name.partition("@")[0] not in known:
        raise UsageError(
            f"{name} is not on this machine, and what it adds to stands in its file alone",
            f"--set second_stage.lora=[NAME] of a file that is here, or one of: {', '.join(known)}",
        )
    pairs = {
        tensor.removesuffix(WEIGHT): LoraPair("", "", None, (out, into), min(RANK, out, into), ("BF16", "BF16"))
        for tensor, (out, into) in linears(transformer).items()
    }
    return LoraFile(Path(name), TensorFiles(Path(name), ()), pairs)
