"""Find or download the files of a request, and open them without reading weights."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ltx2_cli.artifacts.files import folder_state
from ltx2_cli.errors import UsageError
from ltx2_cli.models.arch import Arch
from ltx2_cli.models.config import LTX2_5
from ltx2_cli.models.diffusion_decoder import DiffusionDecoderArch
from ltx2_cli.models.diffusion_decoder_files import open_diffusion_decoder
from ltx2_cli.models.duration_head import DurationHead, open_duration_head
from ltx2_cli.models.lora import preset_lora
from ltx2_cli.models.networks import DENOISER, TEXT_ENCODER, Checkpoint, preset_checkpoint, preset_upsampler
from ltx2_cli.models.open_checkpoint import open_denoiser, open_file, open_folder
from ltx2_cli.models.upsampler import LatentUpsamplerArch, has_upsampler, open_upsampler
from ltx2_cli.plan import recipe
from ltx2_cli.request.profiles import DENOISER_FOLDER
from ltx2_cli.request.spec import Decoder, RunSpec
from ltx2_cli.request.spelling import typed
from ltx2_cli.weights.checkpoint import TensorFiles, collect, raise_all
from ltx2_cli.weights.hub import Download, as_path, beside, list_downloads, local_path, locate_or_download
from ltx2_cli.weights.lora import LoraFile, check_address, lora_downloads, lora_file, open_lora, parse_lora
from ltx2_cli.weights.published import (
    DIFFUSION_DECODER,
    DIFFUSION_DECODER_FILE,
    DURATION_HEAD,
    DURATION_HEAD_FILE,
    NETWORKS,
    TEXT_ENCODER_FILES,
    UPSAMPLER_FILES,
    checkpoint_files,
    named_files,
    network_patterns,
    own_networks,
)

T = TypeVar("T")
Loras = Sequence[tuple[LoraFile, float]]  # each with its strength


def missing_downloads(
    spec: RunSpec, networks: Collection[str] = NETWORKS, from_latents: bool = False
) -> list[Download]:
    """The files that `resolve` would download. Raises `UsageError` for files that neither the cache nor the hub has."""
    second = recipe.guess_request(spec, from_latents).second_stage
    # None: at noise levels of the model, which is not open yet
    refines = second.sigmas != () and spec.running.video
    own = spec.second_stage.upsampler is None and has_upsampler(as_path(spec.checkpoint))
    upsampler = [(second.upsampler, UPSAMPLER_FILES)] if refines and second.upsampler and not own else []
    lora_names = [*spec.lora, *(second.lora or () if refines else ())]
    further = []
    if spec.decoder is Decoder.diffusion and spec.running.video:
        further = [_further_file(spec.checkpoint, DIFFUSION_DECODER_FILE, DIFFUSION_DECODER)[:2]]
    loras, problems = collect({lora: partial(lora_downloads, parse_lora(lora)[0]) for lora in lora_names})
    needed = [list_downloads(name, wanted) for name, wanted in (*named_files(spec, networks), *upsampler, *further)]
    absent = [file for files in (*loras.values(), *needed) for file in files if not file.cached]
    if absent:
        raise_all(problems)
    return absent  # without downloads, `resolve` reports problems of LoRAs together with all others


def open_checkpoint(
    checkpoint: str,
    text_encoder: str | None,
    transformer: str | None,
    offline: bool,
    networks: Collection[str] = NETWORKS,
) -> Checkpoint:
    """The networks of a checkpoint, those of a text encoder for a single file, and the denoiser in the file
    `transformer`; without weights. Files are opened of `networks`, which are read."""
    opened = _open_checkpoint(checkpoint, text_encoder, own_networks(networks, transformer), offline)
    if transformer and DENOISER in networks and (place := _find(transformer, (), offline)):
        denoiser = _once(open_denoiser, place, opened.arch.transformer)
        opened = replace(opened, files={**opened.files, DENOISER: denoiser}) if opened.files else opened
    return opened


def _open_checkpoint(checkpoint: str, text_encoder: str | None, networks: frozenset[str], offline: bool) -> Checkpoint:
    place = _find(checkpoint, checkpoint_files(networks), offline)
    if place is None:
        return preset_checkpoint(checkpoint)
    if place.is_dir() and text_encoder is None:
        return _once(open_folder, place, networks)
    if place.is_dir():
        nothing = typed("text_encoder", "null")
        hint = f"one is named for single files alone: leave it out, or take back a record's: {nothing}"
        raise UsageError(f"{checkpoint} has a text encoder of its own", hint)
    encodes = TEXT_ENCODER in networks
    opened = _once(
        open_file, place, _find(text_encoder, TEXT_ENCODER_FILES, offline) if text_encoder and encodes else None
    )
    if encodes and text_encoder is None and TEXT_ENCODER not in opened.files:
        hint = f"{typed('text_encoder', 'FOLDER')} or REPO names Gemma-3"
        raise UsageError(f"{checkpoint} has no text encoder", hint)
    return opened


def find_upsampler(name: str | None, checkpoint: Checkpoint, offline: bool) -> tuple[LatentUpsamplerArch, TensorFiles]:
    """The upsampler of this name, or of the checkpoint's folder for None; without files if only its description is
    known."""
    if place := _find(name, UPSAMPLER_FILES, offline) if name else checkpoint.where:
        return _once(open_upsampler, place, checkpoint.arch.vae)
    return preset_upsampler(name or ""), TensorFiles()


def find_duration_head(name: str, arch: Arch, offline: bool) -> DurationHead | None:
    """The duration head of the checkpoint `name`; None if it is not here, and `offline`. Raises `UsageError` for a
    checkpoint without one."""
    place = _find_in_newest(name, arch, offline, DURATION_HEAD_FILE, DURATION_HEAD, "a length: --duration 5s")
    return _once(open_duration_head, place, arch.connectors) if place else None


def find_diffusion_decoder(name: str, arch: Arch, offline: bool) -> tuple[DiffusionDecoderArch, TensorFiles]:
    """The diffusion decoder of the checkpoint `name`; the published one, without files, if it is not here, and
    `offline`. Raises `UsageError` for a checkpoint without one."""
    hint = f"{typed('decoder', Decoder.convolution.value)}, which every model has"
    place = _find_in_newest(name, arch, offline, DIFFUSION_DECODER_FILE, DIFFUSION_DECODER, hint)
    return _once(open_diffusion_decoder, place) if place else (DiffusionDecoderArch(), TensorFiles())


def _find_in_newest(name: str, arch: Arch, offline: bool, file: str, folder: str, hint: str) -> Path | None:
    """The place of a network that LTX-2.5 alone has and not every run needs; None if it is not here, and `offline`.
    Raises `UsageError` for a checkpoint without it, of another version before anything is downloaded."""
    network = folder.replace("_", " ")
    if arch.model_version != LTX2_5:
        raise UsageError(f"{name} is {arch.model_version}, and LTX-2.5 alone has a {network}", hint)
    address, wanted, inside = _further_file(name, file, folder)
    if (root := _find(address, wanted, offline)) is None:
        return None
    if (place := root / inside).exists():
        return place
    raise UsageError(f"there is no {network}: {place}", hint)


def _further_file(name: str, file: str, folder: str) -> tuple[str, Sequence[str], str]:
    """Where a checkpoint has a network that not every run needs: a file beside that of a split checkpoint, or else a
    folder. The address, the patterns of what is needed there, and the path in it."""
    split = Path(name.partition("@")[0]).parent.name == DENOISER_FOLDER
    return (beside(name, file), (), "") if split else (name, network_patterns(folder), folder)


class SecondStage(NamedTuple):
    """The files of a second stage."""

    upsampler: LatentUpsamplerArch
    files: TensorFiles  # of the upsampler; none where it is only described
    loras: Loras


def open_second_stage(spec: RunSpec, checkpoint: Checkpoint, offline: bool) -> SecondStage:
    """Open the upsampler and LoRAs of the second stage. Raises `UsageError` for missing ones."""
    opened, problems = collect({"upsampler": partial(find_upsampler, spec.second_stage.upsampler, checkpoint, offline)})
    preset = partial(preset_lora, transformer=checkpoint.networks(spec).transformer)
    loras = open_loras(spec.second_stage.lora or (), offline, problems, preset)
    return SecondStage(*opened["upsampler"], [lora for lora in loras if lora[1]])


def open_loras(
    texts: Sequence[str],
    offline: bool,
    problems: Sequence[UsageError],
    preset: Callable[[str], LoraFile | None] = lambda name: None,
) -> Loras:
    """Open the LoRAs that are found, or describe them by `preset`, each with its strength. Raises `UsageError` for
    `problems` and for LoRAs that are refused."""

    def opened(text: str) -> tuple[LoraFile | None, float]:
        name, strength = parse_lora(text)
        check_address(name)
        path = local_path(name, []) if offline else name
        return open_lora(lora_file(str(path))) if path else preset(name), strength

    loras, unread = collect({str(number): partial(opened, text) for number, text in enumerate(texts)})
    raise_all([*problems, *unread])
    return [(lora, strength) for lora, strength in loras.values() if lora]


def _find(name: str, wanted: Sequence[str], offline: bool) -> Path | None:
    return local_path(name, wanted) if offline else locate_or_download(name, wanted)


def _once(open_files: Callable[..., T], *arguments: object) -> T:
    """`open_files` of these arguments, some of them paths; opened again only after the files changed. The legal sizes
    and the plan of a request come from the same files."""
    states = tuple(folder_state(place) for place in arguments if isinstance(place, Path))
    opened: T = _opened(open_files, arguments, states)
    return opened


@lru_cache(maxsize=8)
def _opened(open_files: Callable[..., Any], arguments: tuple[object, ...], states: tuple[object, ...]) -> Any:
    return open_files(*arguments)
