"""All networks of a checkpoint: described by its configs, born abstract, checked against its files' headers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from ltx2_cli.models.arch import (
    Arch,
    AudioVAEArch,
    ConnectorsArch,
    NetworkArch,
    SchedulerArch,
    TransformerArch,
    VideoVAEArch,
    VocoderArch,
    read_arch,
)
from ltx2_cli.models.audio_vae import AudioVAE
from ltx2_cli.models.connectors import TextConnectors
from ltx2_cli.models.gemma import Gemma, Recipe, checkpoint_prefix, gemma_recipe, in_language_model
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.models.video_vae import VideoVAE
from ltx2_cli.models.vocoder import Vocoder
from ltx2_cli.spec import DType, SpecError
from ltx2_cli.weights.checkpoint import STEMS, TensorFiles, read_json
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.load import mismatches

A = TypeVar("A", bound=NetworkArch)
CONFIG = "config.json"
SCHEDULER = "scheduler/scheduler_config.json"
TEXT_ENCODER = "text_encoder"


class Networks(NamedTuple):
    """One of each network."""

    text_encoder: Gemma
    connectors: TextConnectors
    transformer: Transformer
    vae: VideoVAE
    audio_vae: AudioVAE
    vocoder: Vocoder


def needed_files() -> list[str]:
    """Patterns of the files that a checkpoint must hold, for fetching no more than those."""
    endings = (".safetensors", "-?????-of-?????.safetensors", ".safetensors.index.json")
    stems = {name: ("model",) if name == TEXT_ENCODER else STEMS for name in Networks._fields}
    tensors = [f"{name}/{stem}{end}" for name in Networks._fields for stem in stems[name] for end in endings]
    return [*(f"{name}/{CONFIG}" for name in Networks._fields), *tensors, "tokenizer/*", SCHEDULER]


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says of itself before a weight is read: what its networks are, and where their tensors lie."""

    where: Path
    arch: Arch
    recipe: Recipe
    prefix: str  # of the text encoder's names
    files: Mapping[str, TensorFiles]  # of each network
    tokenizer: Path

    def networks(self, dtype: DType, text_encoder_dtype: DType, scan_layers: bool = True) -> Networks:
        """The networks without their weights."""
        text_encoder = Gemma(Scope(text_encoder_dtype.value, self.prefix), self.recipe)
        return abstract_networks(self.arch, text_encoder, dtype, scan_layers)


def abstract_networks(arch: Arch, text_encoder: Gemma, dtype: DType, scan_layers: bool = True) -> Networks:
    """The text encoder and the networks that `arch` describes, without their weights."""
    scope = Scope(dtype.value)
    return Networks(
        text_encoder,
        TextConnectors(scope, arch.connectors),
        Transformer(scope, arch.transformer, scan_layers),
        VideoVAE(scope, arch.video_vae),
        AudioVAE(scope, arch.audio_vae),
        Vocoder(scope, arch.vocoder),
    )


def open_folder(folder: Path) -> Checkpoint:
    """A checkpoint in diffusers' layout; raises `SpecError` for what is missing, damaged or not implemented."""
    arch, recipe = _read_archs(folder), _read_recipe(folder / TEXT_ENCODER)
    files = _open_files(folder)
    return Checkpoint(folder, arch, recipe, checkpoint_prefix(files[TEXT_ENCODER]), files, folder / "tokenizer")


def _read_archs(folder: Path) -> Arch:
    def read(kind: type[A], name: str) -> A:
        return read_arch(kind, read_json(folder / name), str(folder / name))

    return Arch(
        read(TransformerArch, f"transformer/{CONFIG}"),
        read(ConnectorsArch, f"connectors/{CONFIG}"),
        read(VideoVAEArch, f"vae/{CONFIG}"),
        read(AudioVAEArch, f"audio_vae/{CONFIG}"),
        read(VocoderArch, f"vocoder/{CONFIG}"),
        read(SchedulerArch, SCHEDULER),
    )


def _read_recipe(folder: Path) -> Recipe:
    return gemma_recipe(read_json(folder / CONFIG), str(folder / CONFIG))


def _open_files(folder: Path) -> dict[str, TensorFiles]:
    files, problems = {}, []
    for name in Networks._fields:
        try:
            files[name] = TensorFiles(folder / name, ("model",) if name == TEXT_ENCODER else STEMS)
        except SpecError as error:
            problems.append(error)
    if problems:
        raise SpecError(". ".join(map(str, problems)), problems[0].hint)
    return files


def check(checkpoint: Checkpoint, networks: Networks) -> None:
    """Raise `SpecError` with everything that does not fit: networks among each other, tensors to their network."""
    findings = list(_misfits(checkpoint.arch, checkpoint.recipe))
    for name, module in networks._asdict().items():
        ours = partial(in_language_model, prefix=checkpoint.prefix) if name == TEXT_ENCODER else _any
        findings += [f"{name}: {finding}" for finding in mismatches(module, checkpoint.files[name], ours)]
    if findings:
        raise SpecError(f"{checkpoint.where} does not hold what its configs describe. {'. '.join(findings)}")


def _any(name: str) -> bool:
    return True


def _misfits(arch: Arch, recipe: Recipe) -> Iterator[str]:
    """Sizes in which one network must equal another and does not."""
    text, states = recipe.module.config.hidden_size, recipe.module.config.num_hidden_layers + 1
    mels = arch.audio_vae.mel_bins
    features = arch.audio_vae.latent_channels * arch.audio_vae.latent_mels
    for what, one, other in (
        ("the text encoder's width and the connectors' caption_channels", text, arch.connectors.caption_channels),
        (
            "the text encoder's states and the connectors' text_proj_in_factor",
            states,
            arch.connectors.text_proj_in_factor,
        ),
        (
            "the video VAE's and the transformer's channels",
            arch.video_vae.latent_channels,
            arch.transformer.in_channels,
        ),
        ("the audio VAE's and the transformer's features", features, arch.transformer.audio_in_channels),
        (
            "the audio VAE's and the vocoder's mel channels",
            arch.audio_vae.output_channels * mels,
            arch.vocoder.in_channels,
        ),
    ):
        if one != other:
            yield f"{what} differ: {one} and {other}"
