"""All networks of a checkpoint: described by its configs, born abstract, checked against its files' headers."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ltx2_cli.models.arch import Arch, AudioVAEArch, ConnectorsArch, SchedulerArch, TransformerArch, VideoVAEArch
from ltx2_cli.models.audio_vae import AudioVAE
from ltx2_cli.models.bandwidth import BandwidthVocoder, build_vocoder, vocoder_arch
from ltx2_cli.models.config import Config, read_arch
from ltx2_cli.models.connectors import TextConnectors
from ltx2_cli.models.gemma import Gemma, Recipe, checkpoint_prefix, gemma_recipe, in_language_model
from ltx2_cli.models.tokenizer import check_tokenizer
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.models.video_vae import VideoVAE
from ltx2_cli.models.vocoder import Vocoder
from ltx2_cli.spec import DType, RunSpec, SpecError
from ltx2_cli.weights.checkpoint import AGAIN, STEMS, TensorFiles, read_json
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.load import mismatches

CONFIG = "config.json"
SCHEDULER = "scheduler/scheduler_config.json"
TEXT_ENCODER = "text_encoder"
# what reads each config and says what is wrong with it: those of an `Arch` in its order, then the text encoder's
READERS: dict[str, Callable[[Config, str], Any]] = {
    f"transformer/{CONFIG}": partial(read_arch, TransformerArch),
    f"connectors/{CONFIG}": partial(read_arch, ConnectorsArch),
    f"vae/{CONFIG}": partial(read_arch, VideoVAEArch),
    f"audio_vae/{CONFIG}": partial(read_arch, AudioVAEArch),
    f"vocoder/{CONFIG}": vocoder_arch,
    SCHEDULER: partial(read_arch, SchedulerArch),
    f"{TEXT_ENCODER}/{CONFIG}": gemma_recipe,
}


class Networks(NamedTuple):
    """One of each network."""

    text_encoder: Gemma
    connectors: TextConnectors
    transformer: Transformer
    vae: VideoVAE
    audio_vae: AudioVAE
    vocoder: Vocoder | BandwidthVocoder


def needed_files() -> list[str]:
    """Patterns of the files that a checkpoint must hold, for fetching no more than those."""
    endings = (".safetensors", "-?????-of-?????.safetensors", ".safetensors.index.json")
    stems = {name: ("model",) if name == TEXT_ENCODER else STEMS for name in Networks._fields}
    tensors = [f"{name}/{stem}{end}" for name in Networks._fields for stem in stems[name] for end in endings]
    return [*(f"{name}/{CONFIG}" for name in Networks._fields), *tensors, "tokenizer/*", SCHEDULER]


TEXT_ENCODER_FILES = ["*.json", "model*.safetensors", "tokenizer.model", f"{TEXT_ENCODER}/*", "tokenizer/*"]


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says of itself before a weight is read: what its networks are, and where their tensors lie."""

    where: Path
    arch: Arch
    recipe: Recipe
    prefix: str  # of the text encoder's names
    files: Mapping[str, TensorFiles]  # of each network
    tokenizer: Path

    def networks(self, spec: RunSpec) -> Networks:
        """The networks without their weights, as the request wants them."""
        text_encoder = Gemma(Scope(spec.text_encoder_dtype.value, self.prefix), self.recipe)
        return abstract_networks(self.arch, text_encoder, spec.dtype, spec.scan_layers, spec.clamp_vocoder)


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


def open_folder(folder: Path) -> Checkpoint:
    """A checkpoint in diffusers' layout; raises `SpecError` for what is missing, damaged or not implemented."""
    configs = {name: read_json(folder / name) for name in READERS}
    *archs, recipe = _all(partial(READERS[name], config, str(folder / name)) for name, config in configs.items())
    files, tokenizer = _open_files(folder), folder / "tokenizer"
    return Checkpoint(folder, Arch(*archs), recipe, checkpoint_prefix(files[TEXT_ENCODER]), files, tokenizer)


def _open_files(folder: Path) -> dict[str, TensorFiles]:
    stems = {name: ("model",) if name == TEXT_ENCODER else STEMS for name in Networks._fields}
    openings = [partial(TensorFiles, folder / name, stems[name]) for name in Networks._fields]
    *files, _ = _all([*openings, partial(check_tokenizer, folder / "tokenizer")])
    return dict(zip(Networks._fields, files, strict=True))


def open_text_encoder(folder: Path) -> tuple[Recipe, TensorFiles, Path]:
    """The text encoder in a folder of its own, or in that of a checkpoint in diffusers' layout, and its tokenizer."""
    inside = (folder / TEXT_ENCODER).is_dir()
    place, tokenizer = (folder / TEXT_ENCODER, folder / "tokenizer") if inside else (folder, folder)
    config = read_json(place / CONFIG)
    recipe, files, _ = _all(
        [
            partial(gemma_recipe, config, str(place / CONFIG)),
            partial(TensorFiles, place, ("model",)),
            partial(check_tokenizer, tokenizer),
        ]
    )
    return recipe, files, tokenizer


def _all(readings: Iterable[Callable[[], Any]]) -> list[Any]:
    """What each of the readings gives; raises one `SpecError` with everything that those which fail say."""
    results, problems = [], []
    for reading in readings:
        try:
            results.append(reading())
        except SpecError as error:
            problems.append(error)
    if problems:
        hints = dict.fromkeys(problem.hint for problem in problems)
        raise SpecError(". ".join(map(str, problems)), "; ".join(hints))
    return results


def check(checkpoint: Checkpoint, networks: Networks) -> None:
    """Raise `SpecError` with everything that does not fit: networks among each other, tensors to their network."""
    findings = list(_misfits(checkpoint.arch, checkpoint.recipe))
    for name, module in networks._asdict().items():
        ours = partial(in_language_model, prefix=checkpoint.prefix) if name == TEXT_ENCODER else _any
        findings += [f"{name}: {finding}" for finding in mismatches(module, checkpoint.files[name], ours)]
    if findings:
        raise SpecError(f"{checkpoint.where} does not hold what its configs describe. {'. '.join(findings)}", AGAIN)


def _any(name: str) -> bool:
    return True


def _misfits(arch: Arch, recipe: Recipe) -> Iterator[str]:
    """Sizes in which one network must equal another and does not."""
    text, states = recipe.module.config.hidden_size, recipe.module.config.num_hidden_layers + 1
    mels, denoiser = arch.audio_vae.mel_bins, arch.transformer
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
            denoiser.in_channels,
        ),
        ("the audio VAE's and the transformer's features", features, denoiser.audio_in_channels),
        (
            "the audio VAE's and the vocoder's mel channels",
            arch.audio_vae.output_channels * mels,
            arch.vocoder.in_channels,
        ),
        ("the transformer's channels in and out", denoiser.in_channels, denoiser.out_channels),
        ("the transformer's audio channels in and out", denoiser.audio_in_channels, denoiser.audio_out_channels),
        *(
            (
                f"the {stream.name} connector's width and the transformer's text",
                width,
                stream.caption_channels or stream.text_width,
            )
            for stream, width in zip(denoiser.streams, arch.connectors.widths, strict=True)
        ),
    ):
        if one != other:
            yield f"{what} differ: {one} and {other}"
