"""What the published networks are, so that a run can be planned before anything of them is here.

`published.json` has what their configs say other than the defaults of the classes, and the language model of Gemma-3
12B, where what is left out is transformers' default.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from ltx2_cli.errors import UsageError
from ltx2_cli.models.arch import PUBLISHED_SCHEDULE, Arch, ConnectorsArch, TransformerArch
from ltx2_cli.models.audio_vae import AudioVAEArch
from ltx2_cli.models.config import LTX2, LTX2_3, Config
from ltx2_cli.models.gemma import gemma_arch
from ltx2_cli.models.lora import WEIGHT, linears
from ltx2_cli.models.networks import Checkpoint
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.models.upsampler import LatentUpsamplerArch
from ltx2_cli.models.video_vae import VideoVAEArch
from ltx2_cli.models.vocoder import VocoderArch, VocoderWithBWEArch
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.lora import LoraFile, LoraPair
from ltx2_cli.weights.published import CATALOG, LORA, MODEL

DISTILLING, RANK = "distilled-lora-384", 384  # in the names of LoRAs, and their rank
CONFIGS: Config = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
GEMMA: Config = CONFIGS["text_encoder"]
UPSAMPLERS = {name: LatentUpsamplerArch(**config) for name, config in CONFIGS["upsamplers"].items()}


def _preset(version: str, vocoder: VocoderArch) -> Arch:
    stated: dict[str, dict[str, Any]] = {
        name: {key: tuple(value) if isinstance(value, list) else value for key, value in config.items()}
        for name, config in CONFIGS[version].items()
    }
    transformer, connectors = TransformerArch(**stated["transformer"]), ConnectorsArch(**stated["connectors"])
    vae = VideoVAEArch(**stated["video_vae"])
    return Arch(transformer, connectors, vae, AudioVAEArch(), vocoder, PUBLISHED_SCHEDULE)


PRESETS = {LTX2: _preset(LTX2, VocoderArch()), LTX2_3: _preset(LTX2_3, VocoderWithBWEArch())}


@cache
def preset_checkpoint(checkpoint: str) -> Checkpoint:
    """A published checkpoint as its configs have it, without tensors; raises `UsageError` for one that is unknown."""
    name = checkpoint.partition("@")[0]
    for entry in CATALOG:
        if (entry.kind, entry.name) == (MODEL, name):
            arch, where = PRESETS[entry.model_version.lower().replace("-", "")], Path(checkpoint)
            return Checkpoint(where, arch, gemma_arch(GEMMA, checkpoint), {}, where / "tokenizer")
    raise UsageError(
        f"{checkpoint} is not on this machine, and what its networks are stands in its files alone",
        "fetch it first, or plan one that `ltx2 models` lists: --model ltx2, --model ltx2.3",
    )


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
    return LoraFile(Path(name), TensorFiles(), pairs)
