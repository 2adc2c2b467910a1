"""The files of a request, opened once: networks without their weights, LoRAs, pictures, sound."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ltx2_cli.diffusion.geometry import (
    UpsampleFactors,
)
from ltx2_cli.media.audio import Audio
from ltx2_cli.media.videos import Video
from ltx2_cli.models.lora import find_adapters, reference_scale
from ltx2_cli.models.networks import Checkpoint, Networks, picture_encoder, sound_encoder
from ltx2_cli.models.upsampler import LatentUpsampler, LatentUpsamplerArch
from ltx2_cli.plan.conditions import read_given_sound, read_pictures
from ltx2_cli.plan.open import Loras
from ltx2_cli.request.spec import DType, RunSpec
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.lora import LoraDelta

DENOISER, REFINER = "transformer", "refiner"  # the denoiser, and the same with the second stage's LoRAs merged in
PICTURE_ENCODER, SOUND_ENCODER = "picture_encoder", "sound_encoder"
CONNECTORS, REFINERS_CONNECTORS = "connectors", "refiner_connectors"
LoraDeltas = Mapping[str, Mapping[str, LoraDelta]]  # to which tensors of which network


@dataclass(frozen=True)
class Declared:
    """The networks that a request uses, without their weights: the same on all devices."""

    checkpoint: Checkpoint
    networks: Networks
    added: LoraDeltas  # by the LoRAs
    pictures: tuple[Video, ...]  # that clips show or follow
    sound: Audio | None  # that clips have; None: it is made
    upsampling: UpsampleFactors | None  # before a second stage; None: there is none
    refiner_anew: bool  # the second stage's denoiser is read from files, since it lacks LoRAs of the first's


def add_second_stage(
    declared: Declared,
    upsampler: LatentUpsamplerArch,
    upsampler_files: TensorFiles,
    first: Loras,
    second: Loras,
    dtype: DType,
) -> Declared:
    """With the networks of a second stage, and as REFINER's the deltas of its LoRAs: of the `second`, and in-context
    LoRAs of the `first` are left out. Raises `UsageError` for LoRAs that do not fit. The upsampler has no files where
    it is described, not loaded."""
    files, added = dict(declared.checkpoint.files), declared.added
    networks = declared.networks._replace(
        upsampler=LatentUpsampler(Scope(dtype.value), upsampler), statistics=declared.networks.vae.statistics
    )
    kept = [lora for lora in first if reference_scale(lora[0]) is None]
    anew = len(kept) < len(first)
    if second or anew:
        deltas = find_adapters([*kept, *second], networks)
        if deltas[CONNECTORS] != added[CONNECTORS]:
            networks = networks._replace(refiner_connectors=networks.connectors)
            added = {**added, REFINERS_CONNECTORS: deltas[CONNECTORS]}
        added = {**added, REFINER: (deltas if anew else find_adapters(second, networks))[DENOISER]}
    if files:
        files |= {"upsampler": upsampler_files, "statistics": files["vae"]}
        twins = {REFINER: DENOISER, REFINERS_CONNECTORS: CONNECTORS}
        files |= {name: files[twin] for name, twin in twins.items() if name in added}
    checkpoint = replace(declared.checkpoint, files=files)
    declared = replace(declared, checkpoint=checkpoint, networks=networks, added=added)
    return replace(declared, upsampling=upsampler.upsampling, refiner_anew=anew)


def add_conditions(declared: Declared, spec: RunSpec) -> Declared:
    """With the pictures and the sound of the request, and the networks that encode them. Raises `UsageError` for one
    that cannot be read, or that is another than the request says."""
    checkpoint, networks, files = declared.checkpoint, declared.networks, dict(declared.checkpoint.files)
    if spec.conditions:
        networks = networks._replace(picture_encoder=picture_encoder(checkpoint.arch, spec.dtype))
        files |= {PICTURE_ENCODER: files["vae"]} if files else {}
    pictures = read_pictures(spec)
    if spec.audio or any(picture.audio for picture in pictures):
        networks = networks._replace(sound_encoder=sound_encoder(checkpoint.arch, spec.dtype))
        files |= {SOUND_ENCODER: files["audio_vae"]} if files else {}
    checkpoint = replace(checkpoint, files=files)
    return replace(declared, checkpoint=checkpoint, networks=networks, pictures=pictures, sound=read_given_sound(spec))
