"""The stages of a run: the clip from noise, and the clip upsampled, noised again and refined."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from ltx2_cli.diffusion.denoise import Pass, needed_passes
from ltx2_cli.diffusion.geometry import (
    Geometry,
    UpsampleFactors,
    clip_geometry,
    stage1_size,
)
from ltx2_cli.diffusion.latents import STAGES, Shape, file_shapes, token_shapes
from ltx2_cli.errors import UsageError
from ltx2_cli.media.videos import Video
from ltx2_cli.models.arch import Arch
from ltx2_cli.parallel.mesh import ShardingPlan
from ltx2_cli.plan.inputs import (
    CONNECTORS,
    DENOISER,
    REFINER,
    REFINERS_CONNECTORS,
    LoraDeltas,
)
from ltx2_cli.plan.shown import ShownPicture, shown_pictures
from ltx2_cli.request.spec import NO_GUIDANCE, Guidance, RunSpec, Streams
from ltx2_cli.request.spelling import option, typed

REFERENCE_TOKENS = 4096
FIRST, UPSAMPLED, FINAL = STAGES
UNGUIDED = Streams(NO_GUIDANCE, NO_GUIDANCE)
UNREFINED = (0.0,)  # the noise levels of upsampled latents that are left as they are


@dataclass(frozen=True)
class Stage:
    """One denoising loop and what it starts from."""

    name: str  # of what it leaves, one of `STAGES`
    geometry: Geometry
    shapes: Streams[Shape]  # of one video's latents in a file
    sigmas: np.ndarray  # float32 [steps + 1]; no steps: nothing is denoised
    sharding: ShardingPlan  # of its network and the loop
    passes: tuple[Pass, ...] = (Pass.COND,)
    guidance: Streams[Guidance] = UNGUIDED
    stg_blocks: tuple[int, ...] = ()
    network: str = DENOISER  # or REFINER
    connectors: str = CONNECTORS  # that make the text it reads, or REFINERS_CONNECTORS
    source: Streams[Shape] | None = None  # of the latents that it upsamples and noises first; None: it begins as noise
    noise: str | None = None  # file of the initial noise; None: it is drawn
    adain: float = 0.0  # how far upsampled latents are moved to the statistics they had
    tone_map: float = 0.0  # how far their range is compressed
    keep_audio: bool = False  # the sound is that of the source
    pictures: tuple[ShownPicture, ...] = ()  # those behind the grid in the order of `geometry`
    sounds: tuple[float, ...] = ()  # the strength of each that is given, as long as the stage's

    @property
    def steps(self) -> int:
        """The number of denoising steps."""
        return len(self.sigmas) - 1

    @property
    def token_shapes(self) -> Streams[tuple[int, int]]:
        """The tokens of each stream and their channels, those behind the grid with them."""
        (_, _, channels), (_, tokens, features) = token_shapes(1, self.shapes)
        return Streams((self.geometry.video_tokens, channels), (tokens, features))

    @property
    def draws_noise(self) -> bool:
        """Whether a program draws noise: for the clip, or for what lies behind its grid."""
        return self.noise is None or self.geometry.video_tokens > self.geometry.grid_tokens

    def latent_size(self, shown: ShownPicture) -> tuple[int, int]:
        """Height and width of a picture's latents."""
        downscale = shown.reference.scale.downscale if shown.reference else 1
        return self.geometry.height // downscale, self.geometry.width // downscale


class Phase(NamedTuple):
    """A part of a run: all latents are upsampled to what a stage begins with, or the stage's steps, batch by batch."""

    number: int  # of the stage
    stage: Stage
    upsamples: bool


class InitialLatents(NamedTuple):
    """Latents that a run starts from."""

    shapes: Streams[Shape]  # of one video's in a file
    fps: float


def upsampled_spec(spec: RunSpec, arch: Arch, by: UpsampleFactors, source: InitialLatents) -> RunSpec:
    """The request for what the upsampler makes of these latents."""
    num_frames, height, width = arch.compression.clip_size(*by.upsampled(*source.shapes.video[2:]))
    return replace(spec, num_frames=num_frames, height=height, width=width, fps=source.fps * _faster(spec, by))


def _faster(spec: RunSpec, by: UpsampleFactors) -> int:
    """The factor of the upsampled clip's frame rate."""
    return 1 if spec.second_stage.temporal_upsample == "duration" else by.time


def build_stages(
    spec: RunSpec,
    arch: Arch,
    added: LoraDeltas,
    by: UpsampleFactors | None,
    source: InitialLatents | None,
    guided: ShardingPlan,
    unguided: ShardingPlan,
) -> tuple[Stage, ...]:
    """All stages of a run, or the one that goes on from `source`, upsampled `by`; `guided` is laid out for all passes,
    `unguided` for one. Raises `UsageError` for a size that no upsampler makes."""
    size, fps = (spec.num_frames, spec.height, spec.width), spec.fps
    if by is None:
        return (_first_stage(spec, arch, FINAL, size, fps, guided),)
    stages: tuple[Stage, ...] = ()
    if by.time > 1 and any((condition.num_frames or 1) > 1 for condition in spec.conditions):
        sentence = "a video cannot be shown where the upsampler adds frames: the first stage has fewer"
        raise UsageError(sentence, f"{typed('second_stage.upsampler', 'FILE')} of a spatial one, or a picture")
    if by.time > _faster(spec, by) and spec.audio:
        sentence = "a sound cannot be given where the upsampler stretches the clip: the first stage is shorter"
        raise UsageError(sentence, f"{typed('second_stage.temporal_upsample', 'fps')}, or no {option('audio')}")
    if source is None:
        small = stage1_size(*size, by, arch.compression)
        # The second stage takes the weights where they lie, but for those that its LoRAs are merged into.
        sharding = guided if REFINER in added else unguided
        stages = (_first_stage(spec, arch, FIRST, small, fps / _faster(spec, by), sharding),)
    sigmas = np.asarray(spec.second_stage.sigmas or UNREFINED, np.float32)
    last = Stage(
        FINAL if len(sigmas) > 1 else UPSAMPLED,
        *_measure(spec, arch, size, fps, last=True),
        sigmas,
        unguided,
        network=REFINER if REFINER in added else DENOISER,
        connectors=REFINERS_CONNECTORS if REFINERS_CONNECTORS in added else CONNECTORS,
        source=source.shapes if source else stages[0].shapes,
        adain=spec.second_stage.adain,
        tone_map=spec.second_stage.tone_map,
        keep_audio=bool(spec.second_stage.keep_audio),
    )
    return (*stages, _with_conditions(last, spec, arch, spec.num_frames, last=True))


def _with_conditions(stage: Stage, spec: RunSpec, arch: Arch, num_frames: int, last: bool = False) -> Stage:
    """A stage of so many frames, the `last` of two or the first, with what it is given."""
    pictures, sounds = shown_pictures(spec, arch.compression, num_frames, last), (1.0,) if spec.audio else ()
    return replace(stage, pictures=pictures, sounds=sounds)


def with_sound_of_clip(stage: Stage, pictures: Sequence[Video]) -> Stage:
    """A stage that is given the sound of a clip too, where one of `pictures` has it."""
    heard = (shown.strength for shown in stage.pictures if pictures[shown.number].audio)
    return replace(stage, sounds=(*stage.sounds, *heard))


def _measure(
    spec: RunSpec, arch: Arch, size: tuple[int, int, int], fps: float, last: bool = False
) -> tuple[Geometry, Streams[Shape]]:
    """The latents of a clip with the pictures it shows, and the shapes of one video's in a file. Raises `UsageError`
    where references of their size have no whole latents."""
    shown = shown_pictures(spec, arch.compression, size[0], last)
    keyframes = tuple(chain(*(picture.keyframes(arch.compression.frames) for picture in shown)))
    references = tuple(picture.reference for picture in shown if picture.reference)
    geometry = clip_geometry(*size, fps, arch.compression, arch.transformer.scales, keyframes, references)
    frames, audio_frames = geometry.frames * spec.running.video, geometry.audio_frames * spec.running.audio
    geometry = replace(geometry, frames=frames, audio_frames=audio_frames)
    for _, (downscale, _) in references:
        if geometry.height % downscale or geometry.width % downscale:
            multiple = downscale * arch.compression.pixels
            height, width = (max(round(side / multiple), 1) * multiple for side in size[1:])
            sentence = f"references of 1/{downscale} of {size[2]}x{size[1]} do not divide into this model's latents"
            raise UsageError(sentence, f"nearest, of the first stage: {width}x{height}")
    channels = Streams(arch.transformer.in_channels, arch.transformer.audio_in_channels)
    return geometry, file_shapes(geometry, channels, arch.audio_vae.latent_mels)


def first_geometry(spec: RunSpec, arch: Arch, by: UpsampleFactors | None) -> Geometry:
    """The latents of the stage that begins as noise, the first of two where they are upsampled `by`."""
    size, fps = (spec.num_frames, spec.height, spec.width), spec.fps
    if by is not None:
        size, fps = stage1_size(*size, by, arch.compression), fps / _faster(spec, by)
    return _measure(spec, arch, size, fps)[0]


def longest_context(spec: RunSpec, arch: Arch, by: UpsampleFactors | None) -> int:
    """The tokens of the longest context of any attention: a stage's video, or the text."""
    size = spec.num_frames, spec.height, spec.width
    last, _ = _measure(spec, arch, size, spec.fps, last=by is not None)
    return max(last.video_tokens, first_geometry(spec, arch, by).video_tokens, spec.max_sequence_length)


def _first_stage(
    spec: RunSpec, arch: Arch, name: str, size: tuple[int, int, int], fps: float, sharding: ShardingPlan
) -> Stage:
    """The stage that begins as noise."""
    guidance, (geometry, shapes) = recipe_guidance(spec, arch), _measure(spec, arch, size, fps)
    if spec.sigmas is not None:
        sigmas = np.asarray(spec.sigmas, np.float32)
    else:
        assert spec.num_inference_steps is not None
        tokens = geometry.video_tokens if spec.shift_tokens == "actual" and spec.running.video else REFERENCE_TOKENS
        sigmas = arch.scheduler.sigmas(spec.num_inference_steps, tokens)
    passes, blocks = needed_passes(guidance), spec.stg_blocks or ()
    stage = Stage(name, geometry, shapes, sigmas, sharding, passes, guidance, blocks)
    stage = replace(stage, noise=spec.initial_noise)
    return _with_conditions(stage, spec, arch, size[0])


def recipe_guidance(spec: RunSpec, arch: Arch) -> Streams[Guidance]:
    """The guidance of the first stage: of the streams that it makes. A sound that is given is not led anywhere."""
    asked = (vars(spec.guidance.video), vars(spec.guidance.audio))
    guidance = Streams(*(Guidance(*(scale for scale in stream.values() if scale is not None)) for stream in asked))
    if not all(spec.running):  # a stream alone has none to come closer to
        guidance = Streams(*(replace(stream, modality_scale=1.0) for stream in guidance))
    led = spec.running._replace(audio=spec.running.audio and not spec.audio)
    guidance = Streams(*(stream if wanted else NO_GUIDANCE for stream, wanted in zip(guidance, led, strict=True)))
    if not spec.stg_blocks or (spec.stg_rule == "config" and not arch.transformer.perturbed_attn):
        return Streams(*(replace(stream, stg_scale=0.0) for stream in guidance))
    return guidance
