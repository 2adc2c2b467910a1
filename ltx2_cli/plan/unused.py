"""Options without effect: keys of a request that were set and change nothing."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from ltx2_cli.diffusion.sampler import find_sampler
from ltx2_cli.request.spec import NO_GUIDANCE, Decoder, Guidance, RunSpec, Streams
from ltx2_cli.request.spelling import short_name, typed


class ResolvedRequest(NamedTuple):
    """A complete request; the guidance that its first stage has; the factor by which the second stage's upsampler
    multiplies frames, None: there is one stage; and whether a run goes on from saved latents."""

    spec: RunSpec
    guidance: Streams[Guidance]
    time: int | None
    from_latents: bool


class Dependence(NamedTuple):
    """When keys have an effect, why they have none otherwise, and the key and value of a request that mend it."""

    keys: tuple[str, ...]
    has_effect: Callable[[ResolvedRequest], bool]
    otherwise: str
    cure: tuple[str, str] | None = None


STREAMS, GUIDANCE_SCALES = Streams._fields, tuple(vars(NO_GUIDANCE))
SECOND_STAGE = (
    "upsampler",
    "lora",
    "sampler",
    "keep_audio",
    "freeze_audio",
    "follow_first",
    "temporal_upsample",
    "keyframe_windows",
    "spatial_tiles",
    "temporal_tiles",
)
GIVEN = "the audio is given"


def _guidance(stream: str, *scales: str) -> tuple[str, ...]:
    return tuple(f"guidance.{stream}.{scale}" for scale in scales)


def _uses(scale: str) -> Callable[[ResolvedRequest], bool]:
    """Whether either stream has this guidance."""
    return lambda request: any(vars(stream)[scale] != vars(NO_GUIDANCE)[scale] for stream in request.guidance)


def _is_guided(stream: str) -> Callable[[ResolvedRequest], bool]:
    """Whether a stream has other guidance than its rescaling, which is of that."""
    return lambda request: replace(getattr(request.guidance, stream), guidance_rescale=0.0) != NO_GUIDANCE


DEPENDENCES = (
    Dependence(
        ("image_crf",),
        lambda request: any(shown.kind in ("image", "clip") for shown in request.spec.conditions),
        "no image is shown",
    ),
    Dependence(
        ("image_strength",),
        lambda request: (
            request.from_latents
            or any(shown.kind == "image" and shown.strength is None for shown in request.spec.conditions)
        ),
        "no image is without a strength of its own",
    ),
    Dependence(
        ("loudness",),
        lambda request: (
            request.spec.running.audio and all(condition.kind != "clip" for condition in request.spec.conditions)
        ),
        "no audio is made, or that of a clip is kept",
    ),
    Dependence(("window_overlap",), lambda request: request.spec.windows > 1, "there is one window", ("windows", "2")),
    Dependence(
        ("keyframes", "keyframe_segments", "decoder"), lambda request: request.spec.running.video, "no video is made"
    ),
    Dependence(
        ("vae_memory_gb",),
        lambda request: request.spec.running.video and request.spec.decoder is Decoder.convolution,
        "no video is made, or the diffusion decoder makes it in tiles of one size",
    ),
    Dependence(
        ("eta",),
        lambda request: (
            request.from_latents
            or any(
                name and find_sampler(name).draws for name in (request.spec.sampler, request.spec.second_stage.sampler)
            )
        ),
        "the sampler draws no noise",
        ("sampler", "euler_ancestral"),
    ),
    Dependence(
        ("negative_prompt",),
        lambda request: request.spec.nag_scale is not None or _uses("guidance_scale")(request),
        "guidance_scale is 1",
        ("nag_scale", "11"),
    ),
    Dependence(
        ("nag_tau", "nag_alpha"),
        lambda request: request.spec.nag_scale is not None,
        "nag_scale is null",
        ("nag_scale", "11"),
    ),
    Dependence(("stg_blocks", "stg_every"), _uses("stg_scale"), "stg_scale is 0"),
    Dependence(("modality_every",), _uses("modality_scale"), "modality_scale is 1"),
    Dependence(
        ("guidance_interval",), lambda request: any(_is_guided(each)(request) for each in STREAMS), "nothing guides"
    ),
    Dependence(_guidance("video", *GUIDANCE_SCALES), lambda request: request.spec.running.video, "no video is made"),
    Dependence(_guidance("audio", *GUIDANCE_SCALES), lambda request: request.spec.running.audio, "no audio is made"),
    Dependence(_guidance("audio", *GUIDANCE_SCALES), lambda request: request.spec.audio is None, GIVEN),
    Dependence(
        tuple(key for stream in STREAMS for key in _guidance(stream, "modality_scale")),
        lambda request: all(request.spec.running),
        "video and audio are not made together",
    ),
    *(
        Dependence(_guidance(stream, "guidance_rescale"), _is_guided(stream), "nothing else guides")
        for stream in STREAMS
    ),
    Dependence(
        tuple(f"second_stage.{key}" for key in SECOND_STAGE),
        lambda request: request.time is not None,
        "there is one stage",
        ("recipe", "two_stage"),
    ),
    Dependence(
        ("second_stage.temporal_upsample",),
        lambda request: request.time != 1,
        "the upsampler is spatial",
        ("second_stage.upsampler", "FILE"),
    ),
)


def unused_options(request: ResolvedRequest) -> Iterator[str]:
    """A sentence for each key that was set without effect."""
    for key in request.spec.asked:
        without = (each for each in DEPENDENCES if key in each.keys and not each.has_effect(request))
        if dependence := next(without, None):
            cure = f": {typed(*dependence.cure)}" if dependence.cure else ""
            yield f"{short_name(key)} changes nothing, {dependence.otherwise}{cure}"
