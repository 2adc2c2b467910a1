"""The files of a request, opened once: networks without their weights, LoRAs, images, videos, audio."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ltx2_cli.diffusion.geometry import UpsampleFactors
from ltx2_cli.errors import UsageError
from ltx2_cli.media.audio import Audio
from ltx2_cli.media.videos import Video
from ltx2_cli.models.diffusion_decoder import DiffusionDecoder, DiffusionDecoderArch
from ltx2_cli.models.lora import REFERENCE_KEYS, find_adapters, reference_scale
from ltx2_cli.models.networks import DENOISER, Checkpoint, Networks, audio_encoder, network_options, video_encoder
from ltx2_cli.models.upsampler import LatentUpsampler
from ltx2_cli.plan.conditions import read_input_audio, read_input_videos
from ltx2_cli.plan.open import Loras, SecondStage
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.spelling import option_name, typed
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.published import DIFFUSION_DECODER
from ltx2_cli.weights.transfer import LoraDeltas

STAGE2_DENOISER = "refiner"  # the denoiser with the second stage's LoRAs merged in
VIDEO_ENCODER, AUDIO_ENCODER = "video_encoder", "audio_encoder"
CONNECTORS, STAGE2_CONNECTORS = "connectors", "refiner_connectors"
FILES_OF = {  # networks that are read from the files of another one
    "statistics": "vae",
    VIDEO_ENCODER: "vae",
    AUDIO_ENCODER: "audio_vae",
    STAGE2_DENOISER: DENOISER,
    STAGE2_CONNECTORS: CONNECTORS,
}


@dataclass(frozen=True)
class PlanInputs:
    """The opened files of a request: the same on all devices."""

    checkpoint: Checkpoint
    networks: Networks
    lora_deltas: Mapping[str, LoraDeltas]  # by network
    input_videos: tuple[Video, ...]  # of each condition; an image has one frame
    input_audio: Audio | None  # of the clip, if the request has it
    upsampling: UpsampleFactors | None  # before a second stage; None: there is none
    reload_stage2: bool  # the second stage's denoiser is read from files: its LoRAs cannot be added to the first's


def open_inputs(
    spec: RunSpec,
    checkpoint: Checkpoint,
    loras: Loras,
    second: SecondStage | None,
    diffusion_decoder: tuple[DiffusionDecoderArch, TensorFiles] | None,
) -> PlanInputs:
    """Open the inputs of a complete request, with these LoRAs, this second stage and this decoder. Raises `UsageError`
    for LoRAs that do not fit the networks, and for files that cannot be read or whose hash is not the record's."""
    networks, deltas = (
        checkpoint.networks(spec),
        {**find_adapters(loras, checkpoint.networks(replace(spec, streams="both")))},
    )
    # in-context LoRAs follow references in the first stage alone
    kept = [(lora, strength) for lora, strength in loras if reference_scale(lora) is None]
    # and a sum with weights of eight bits would be rounded twice
    rounded = checkpoint.matrices(spec).transformer is not None
    reload_stage2 = second is not None and (len(kept) < len(loras) or (rounded and bool(second.loras)))
    if second:
        upsampler = LatentUpsampler(Scope(spec.dtype.value), second.upsampler)
        assert networks.vae is not None
        networks = networks._replace(upsampler=upsampler, statistics=networks.vae.statistics)
    if second and spec.second_stage.follow_first:
        _check_follows(second)
    if second and (second.loras or reload_stage2):
        both = find_adapters([*kept, *second.loras], networks)
        if both[CONNECTORS] != deltas[CONNECTORS]:
            networks, deltas[STAGE2_CONNECTORS] = (
                networks._replace(refiner_connectors=networks.connectors),
                both[CONNECTORS],
            )
        deltas[STAGE2_DENOISER] = (both if reload_stage2 else find_adapters(second.loras, networks))[DENOISER]
    further_files = {"upsampler": second.files} if second else {}
    if diffusion_decoder:
        arch, further_files[DIFFUSION_DECODER] = diffusion_decoder
        networks = networks._replace(vae=None, diffusion_decoder=DiffusionDecoder(Scope(spec.dtype.value), arch))
    videos, audio = read_input_videos(spec), read_input_audio(spec)
    in_tiles = second is not None and spec.second_stage.in_tiles
    draws = in_tiles and checkpoint.arch.transformer.use_keyframes_abs_pos_embedding  # keyframes again
    if spec.conditions or draws:
        networks = networks._replace(video_encoder=video_encoder(checkpoint.arch, spec.dtype, draws))
    if audio or any(video.audio for video in videos):
        networks = networks._replace(audio_encoder=audio_encoder(checkpoint.arch, spec.dtype))
    if checkpoint.files:
        files = {
            **checkpoint.files,
            **further_files,
            **_shared_files(checkpoint.files, {*networks.present(), *deltas}),
        }
        checkpoint = replace(checkpoint, files=files)
    upsampling = second.upsampler.upsampling if second else None
    return PlanInputs(checkpoint, networks, deltas, videos, audio, upsampling, reload_stage2)


def _check_follows(second: SecondStage) -> None:
    """Raise `UsageError` for a second stage that cannot follow the first one's video: by its upsampler, for want of an
    in-context LoRA, or for one of another size."""
    by = second.upsampler.upsampling
    if by.time > 1 or by.up % by.down:
        adds = "adds frames" if by.time > 1 else f"enlarges by {by.up}/{by.down}"
        hint = f"{typed('second_stage.upsampler', 'FILE')} that doubles height and width"
        raise UsageError(f"the second stage follows the first one's video, and its upsampler {adds}", hint)
    scales = [(lora, scale) for lora, _ in second.loras if (scale := reference_scale(lora))]
    if not scales:
        hint = f"{typed('second_stage.lora', ['FILE'])} of one, or {typed('second_stage.follow_first', value=False)}"
        raise UsageError("nothing follows the first stage's video: no in-context LoRA is given", hint)
    for lora, scale in scales:
        stated = any(key in lora.files.metadata for key in REFERENCE_KEYS)
        if stated and (scale.downscale * by.down, scale.temporal) != (by.up, by.time):
            sentence = f"{lora.path} follows references of 1/{scale.downscale} of the size, and the first stage's video"
            raise UsageError(f"{sentence} has {by.down}/{by.up}", f"another {option_name('second_stage.lora')}")


def network_values(spec: RunSpec) -> tuple[object, ...]:
    """A value that is equal for two requests with the same networks."""
    second = spec.second_stage
    files = spec.checkpoint, spec.text_encoder, spec.transformer, spec.lora, second.upsampler, second.lora
    return *files, spec.weights, spec.compute, spec.decoder, *network_options(spec)


def _shared_files(files: Mapping[str, TensorFiles], needed: Collection[str]) -> dict[str, TensorFiles]:
    return {name: files[source] for name, source in FILES_OF.items() if name in needed and source in files}
