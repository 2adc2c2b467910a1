"""All networks of a checkpoint: their description before a weight is read, and the abstract networks; and what the
published ones are, so that a run can be planned before anything of them is here.

`published.json` has what their configs say other than the defaults of the classes, and that of the language model of
Gemma-3 12B, where what is left out is transformers' default.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

from ltx2_cli.errors import UsageError
from ltx2_cli.models.arch import Arch, ConnectorsArch, SchedulerArch, TransformerArch
from ltx2_cli.models.audio_vae import AudioVAE, AudioVAEArch
from ltx2_cli.models.config import LTX2, LTX2_3, Config, read_arch
from ltx2_cli.models.connectors import TextConnectors
from ltx2_cli.models.gemma import Gemma, GemmaArch, gemma_arch
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.models.upsampler import LatentUpsampler, LatentUpsamplerArch
from ltx2_cli.models.video_vae import LatentStatistics, VideoVAE, VideoVAEArch
from ltx2_cli.models.vocoder import Vocoder, VocoderWithBWE, build_vocoder, vocoder_arch
from ltx2_cli.request.spec import DType, RunSpec
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.published import CATALOG, MODEL

TEXT_ENCODER = "text_encoder"
# reads the config of each part of an `Arch`, in its order
READERS: dict[str, Callable[[Config, str], Any]] = {
    "transformer": partial(read_arch, TransformerArch),
    "connectors": partial(read_arch, ConnectorsArch),
    "vae": partial(read_arch, VideoVAEArch),
    "audio_vae": partial(read_arch, AudioVAEArch),
    "vocoder": vocoder_arch,
    "scheduler": partial(read_arch, SchedulerArch),
}
# builds each abstract network of an `Arch` from its description
BUILDERS: dict[str, Callable[[Scope, Any], nnx.Module]] = {
    "connectors": TextConnectors,
    "transformer": Transformer,
    "vae": VideoVAE,
    "audio_vae": AudioVAE,
    "vocoder": build_vocoder,
}


class Networks(NamedTuple):
    """One of each network."""

    text_encoder: Gemma
    connectors: TextConnectors
    transformer: Transformer
    vae: VideoVAE
    audio_vae: AudioVAE
    vocoder: Vocoder | VocoderWithBWE
    # of a second stage
    upsampler: LatentUpsampler | None = None
    statistics: LatentStatistics | None = None  # those of the video autoencoder
    refiner_connectors: TextConnectors | None = None  # where its LoRAs change these too

    def present(self) -> dict[str, nnx.Module]:
        """Those that there are, by name."""
        return {name: module for name, module in self._asdict().items() if module is not None}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint before a weight is read: the description of its networks, and where their tensors lie."""

    where: Path
    arch: Arch
    text_encoder: GemmaArch
    files: Mapping[str, TensorFiles]  # of each network
    tokenizer: Path

    def networks(self, spec: RunSpec) -> Networks:
        """The networks that a run uses, without their weights, as the request wants them; no autoencoder's encoder.
        Built once for requests that want the same: nobody may change them."""
        options = spec.dtype, spec.scan_layers, spec.clamp_vocoder
        return _run_networks(self.arch, self.text_encoder, spec.text_encoder_dtype, *options)


@lru_cache(maxsize=4)
def _run_networks(arch: Arch, text: GemmaArch, text_dtype: DType, *options: Any) -> Networks:
    networks = abstract_networks(arch, Gemma(Scope(text_dtype.value), text), *options)
    del networks.vae.encoder, networks.audio_vae.encoder  # what a run does not use is not loaded
    return networks


def abstract_networks(
    arch: Arch, text_encoder: Gemma, dtype: DType, scan_layers: bool = True, clamp_vocoder: bool = True
) -> Networks:
    """The text encoder and the networks that `arch` describes, without their weights."""
    scope = Scope(dtype.value)
    return Networks(
        text_encoder,
        TextConnectors(scope, arch.connectors),
        Transformer(scope, arch.transformer, scan_layers),
        VideoVAE(scope, arch.video_vae),
        AudioVAE(scope, arch.audio_vae),
        build_vocoder(scope, arch.vocoder, clamp_vocoder),
    )


CONFIGS: Config = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
GEMMA: Config = CONFIGS["text_encoder"]
UPSAMPLERS = {name: LatentUpsamplerArch(**config) for name, config in CONFIGS["upsamplers"].items()}


PRESETS = {
    version: Arch(*(read(CONFIGS[version][name], "published.json") for name, read in READERS.items()))
    for version in (LTX2, LTX2_3)
}


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
