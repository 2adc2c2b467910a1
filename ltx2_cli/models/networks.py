"""All networks of a checkpoint: described before a weight is read and built without weights; the published ones are
known before their files are here."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from flax import nnx

from ltx2_cli.errors import UnknownNetworkError, UsageError
from ltx2_cli.models.arch import Arch, ConnectorsArch, SchedulerArch, TransformerArch
from ltx2_cli.models.audio_vae import AudioVAE, AudioVAEArch
from ltx2_cli.models.config import VERSIONS, Config, read_arch
from ltx2_cli.models.connectors import TextConnectors
from ltx2_cli.models.diffusion_decoder import DiffusionDecoder
from ltx2_cli.models.gemma import Gemma, GemmaArch, gemma_arch
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.models.upsampler import LatentUpsampler, LatentUpsamplerArch
from ltx2_cli.models.video_vae import LatentStatistics, VideoVAE, VideoVAEArch
from ltx2_cli.models.vocoder import Vocoder, VocoderWithBWE, build_vocoder, vocoder_arch
from ltx2_cli.request.spec import BOTH, ComputeType, DType, RunSpec, Streams, WeightType
from ltx2_cli.request.spelling import typed
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.published import CATALOG, MODEL_KIND
from ltx2_cli.weights.tensors import MatrixType

TEXT_ENCODER, DENOISER = "text_encoder", "transformer"
# reads the config of each part of an `Arch`, in its order
READERS: dict[str, Callable[[Config, str], Any]] = {
    "transformer": partial(read_arch, TransformerArch),
    "connectors": partial(read_arch, ConnectorsArch),
    "vae": partial(read_arch, VideoVAEArch),
    "audio_vae": partial(read_arch, AudioVAEArch),
    "vocoder": vocoder_arch,
    "scheduler": partial(read_arch, SchedulerArch),
}
MATRIX_TYPES = {
    WeightType.int8: MatrixType(np.dtype(np.int8)),
    WeightType.fp8: MatrixType(np.dtype(ml_dtypes.float8_e4m3fn)),
    WeightType.int4: MatrixType(np.dtype(ml_dtypes.int4), group_size=256),
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
    vae: VideoVAE | None  # None: the diffusion decoder is in its place
    audio_vae: AudioVAE
    vocoder: Vocoder | VocoderWithBWE
    diffusion_decoder: DiffusionDecoder | None = None
    # of a second stage
    upsampler: LatentUpsampler | None = None
    statistics: LatentStatistics | None = None  # those of the video autoencoder
    refiner_connectors: TextConnectors | None = None  # where its LoRAs change these too
    # autoencoders without their decoders, where a clip has input images, videos or audio
    video_encoder: VideoVAE | None = None
    audio_encoder: AudioVAE | None = None

    def present(self) -> dict[str, nnx.Module]:
        """The networks of the run, by name."""
        return {name: module for name, module in self._asdict().items() if module is not None}


class Matrices(NamedTuple):
    """The types of the matrices in the layers of each network; None: they are in its dtype."""

    text_encoder: MatrixType | None = None
    connectors: MatrixType | None = None
    transformer: MatrixType | None = None


WIDE = Matrices()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint before a weight is read: the description of its networks, and where their tensors lie."""

    where: Path
    arch: Arch
    files: Mapping[str, TensorFiles]  # of each network
    tokenizer: Path

    def networks(self, spec: RunSpec) -> Networks:
        """The networks that a run uses, without their weights, as the request wants them; no autoencoder's encoder.
        Built once for requests that want the same: nobody may change them."""
        return _run_networks(self.arch, *network_options(spec), self.matrices(spec))

    def matrices(self, spec: RunSpec) -> Matrices:
        """The types of matrices of a request: asked for, or as they are stored where that is in eight bits."""

        def of(network: str, dtype: DType) -> MatrixType | None:
            if dtype is DType.float32:  # the reference for others
                return None
            if spec.weights is not WeightType.auto:
                return MATRIX_TYPES.get(spec.weights)
            return self.files[network].matrix_type if network in self.files else None

        text_encoder, connectors = of("text_encoder", spec.text_encoder_dtype), of("connectors", spec.dtype)
        denoiser = of("transformer", spec.dtype)
        if spec.compute is ComputeType.full:
            if denoiser is None:
                hint = f"{typed('weights', 'int8')}, or {typed('compute', 'weights')}"
                raise UsageError("compute full multiplies in eight bits, and the denoiser's matrices are wider", hint)
            denoiser = denoiser._replace(rounds_input=True)
        return Matrices(text_encoder, connectors, denoiser)


def network_options(spec: RunSpec) -> tuple[object, ...]:
    """The request's options for networks, besides files and matrices: the arguments of `abstract_networks` after the
    description."""
    return spec.dtype, spec.text_encoder_dtype, spec.scan_layers, not spec.follows_diffusers, spec.running


@lru_cache(maxsize=4)
def video_encoder(arch: Arch, dtype: DType, decodes: bool) -> VideoVAE:
    """The video autoencoder without weights, and without its decoder unless it also `decodes`. Built once, as
    `Checkpoint.networks`."""
    vae = VideoVAE(Scope(dtype.value), arch.vae)
    if not decodes:
        del vae.decoder
    return vae


@lru_cache(maxsize=4)
def audio_encoder(arch: Arch, dtype: DType) -> AudioVAE:
    """The audio autoencoder without its decoder and without weights. Built once, as `Checkpoint.networks`."""
    vae = AudioVAE(Scope(dtype.value), arch.audio_vae)
    del vae.decoder
    return vae


@lru_cache(maxsize=8)
def _run_networks(*options: Any) -> Networks:
    networks = abstract_networks(*options)
    assert networks.vae is not None
    del networks.vae.encoder, networks.audio_vae.encoder  # what a run does not use is not loaded
    return networks


def abstract_networks(
    arch: Arch,
    dtype: DType,
    text_encoder_dtype: DType,
    scan_layers: bool = True,
    clamp_vocoder: bool = True,
    running: Streams[bool] = BOTH,
    matrices: Matrices = WIDE,
) -> Networks:
    """The networks that `arch` describes, without their weights; of the denoiser the streams that are `running`."""
    scope = Scope(dtype.value)
    return Networks(
        Gemma(Scope(text_encoder_dtype.value, matrices=matrices.text_encoder), arch.text_encoder),
        TextConnectors(replace(scope, matrices=matrices.connectors), arch.connectors),
        Transformer(replace(scope, matrices=matrices.transformer), arch.transformer, scan_layers, running),
        VideoVAE(scope, arch.vae),
        AudioVAE(scope, arch.audio_vae),
        build_vocoder(scope, arch.vocoder, clamp_vocoder),
    )


# What published configs say other than the defaults of the classes: a run is planned before a checkpoint is here.
CONFIGS: Config = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
UPSAMPLERS = {name: LatentUpsamplerArch(**config) for name, config in CONFIGS["upsamplers"].items()}


def published_config(version: str, network: str) -> Config:
    """The config of a network of a published model; of a later model, that of the one before it and what differs."""
    page = CONFIGS[version]
    before = published_config(page["as"], network) if "as" in page else {}
    return {**before, **page.get(network, {})}


def published_text_encoder(transformer: TransformerArch) -> GemmaArch:
    """The text encoder of the published model with this denoiser."""
    return gemma_arch(CONFIGS["text_encoders"][transformer.text_encoder], "published.json")


def _preset(version: str) -> Arch:
    archs = {name: read(published_config(version, name), "published.json") for name, read in READERS.items()}
    return Arch(**archs, text_encoder=published_text_encoder(archs[DENOISER]))


PRESETS = {version: _preset(version) for version in VERSIONS}


@cache
def preset_checkpoint(checkpoint: str) -> Checkpoint:
    """A published checkpoint as its configs have it, without tensors; raises `UsageError` for one that is unknown."""
    name = checkpoint.partition("@")[0]
    for entry in CATALOG:
        if (entry.kind, entry.name) == (MODEL_KIND, name):
            arch, where = PRESETS[entry.model_version.lower().replace("-", "")], Path(checkpoint)
            return Checkpoint(where, arch, {}, where / "tokenizer")
    raise UnknownNetworkError(
        f"{checkpoint} is not on this machine, and what its networks are stands in its files alone",
        f"fetch it first, or plan one that `ltx2 models` lists: {', '.join(VERSIONS)}",
    )


def preset_upsampler(name: str) -> LatentUpsamplerArch:
    """A published upsampler; raises `UsageError` for one that is not known here."""
    if (known := UPSAMPLERS.get(name.partition("@")[0])) is None:
        raise UnknownNetworkError(
            f"{name} is not on this machine, and what it makes of a clip stands in its file alone",
            f"{typed('second_stage.upsampler', 'FILE')} that is here, or one of: {', '.join(UPSAMPLERS)}",
        )
    return known
