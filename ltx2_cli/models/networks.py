"""All networks of a checkpoint: their description before a weight is read, and the abstract networks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

from ltx2_cli.models.arch import Arch
from ltx2_cli.models.audio_vae import AudioVAE
from ltx2_cli.models.connectors import TextConnectors
from ltx2_cli.models.gemma import Gemma, GemmaArch
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.models.upsampler import LatentUpsampler
from ltx2_cli.models.video_vae import LatentStatistics, VideoVAE
from ltx2_cli.models.vocoder import Vocoder, VocoderWithBWE, build_vocoder
from ltx2_cli.request.spec import DType, RunSpec
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.declare import Scope

TEXT_ENCODER = "text_encoder"
ARCHS = ("transformer", "connectors", "vae", "audio_vae", "vocoder", "scheduler")  # what an `Arch` is made of, in order
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

        Built once for requests that want the same: nobody may change them.
        """
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
