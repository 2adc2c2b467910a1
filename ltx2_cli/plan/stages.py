"""Stages of a run: the clip from noise, and the upsampled clip, noised again and refined."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from ltx2_cli.diffusion.conditions import CrossTimestep, References, X0Sigma
from ltx2_cli.diffusion.denoise import Pass, Schedule, needed_passes
from ltx2_cli.diffusion.geometry import (
    Geometry,
    ReferenceGrid,
    ReferenceScale,
    UpsampleFactors,
    clip_geometry,
    stage1_size,
)
from ltx2_cli.diffusion.latents import FINAL, FIRST, UPSAMPLED, LatentShape, file_shapes, token_shapes
from ltx2_cli.diffusion.sampler import find_sampler
from ltx2_cli.errors import UsageError
from ltx2_cli.media.videos import Video
from ltx2_cli.models.arch import Arch
from ltx2_cli.models.networks import DENOISER, PRESETS
from ltx2_cli.parallel.mesh import ShardingPlan
from ltx2_cli.plan.condition_slices import HELD, ConditionSlice, condition_slices, fully_conditioned, window_slices
from ltx2_cli.plan.edit import edit_of, edited, noise_level
from ltx2_cli.plan.inputs import CONNECTORS, STAGE2_CONNECTORS, STAGE2_DENOISER, PlanInputs
from ltx2_cli.plan.keyframe_windows import check_rounds, keyframes_of_rounds, segment_ends, segment_slices
from ltx2_cli.plan.positions import PlacedVideo, generated_keyframes, place_videos, reference_weights
from ltx2_cli.plan.stage_tiles import StageTiles, plan_stage_tiles
from ltx2_cli.plan.windows import ClipWindow, plan_keyframe_windows, plan_windows
from ltx2_cli.request.spec import NO_GUIDANCE, Guidance, RunSpec, Streams
from ltx2_cli.request.spelling import option_name, typed

REFERENCE_TOKENS = 4096  # of a schedule by the clip's tokens, where there is no video
UNGUIDED = Streams(NO_GUIDANCE, NO_GUIDANCE)
NO_SLICES: Streams[tuple[ConditionSlice, ...]] = Streams((), ())
NEITHER = Streams(False, False)
NO_CONDITIONS: Streams[int | None] = Streams(None, None)
UNREFINED = (0.0,)  # the noise levels of upsampled latents that are left as they are
EULER = "euler"  # the usual sampler


class StageSize(NamedTuple):
    """Sizes of a stage, before its sharding is chosen."""

    geometry: Geometry
    shapes: Streams[LatentShape]  # of one video's latents in a file
    placed_videos: tuple[PlacedVideo, ...]  # those behind the grid in the order of `geometry`
    windows: tuple[ClipWindow, ...]
    tiles: StageTiles | None  # None: one

    @property
    def at_once(self) -> Geometry:
        """The latents that are denoised at once."""
        parts = (
            [window.geometry(self.geometry) for window in self.windows] if len(self.windows) > 1 else [self.geometry]
        )
        largest = max(parts, key=lambda part: part.video_tokens)
        return self.tiles.geometry(largest) if self.tiles else largest


@dataclass(frozen=True)
class Stage:
    """One denoising loop, its initial latents and its conditions."""

    name: str  # of its result, one of `STAGES`
    geometry: Geometry
    shapes: Streams[LatentShape]  # of one video's latents in a file
    placed_videos: tuple[PlacedVideo, ...]  # those behind the grid in the order of `geometry`
    windows: tuple[ClipWindow, ...]  # of the whole clip
    tiles: StageTiles | None  # of its latents, or of a window's; None: one
    sigmas: np.ndarray  # float32 [steps + 1]; no steps: nothing is denoised
    sharding: ShardingPlan  # of its network and the loop
    step_passes: tuple[tuple[Pass, ...], ...] = ()  # of each step; empty: the conditional one alone
    guidance: Streams[Guidance] = UNGUIDED
    stg_blocks: tuple[int, ...] = ()
    network: str = DENOISER  # or STAGE2_DENOISER
    connectors: str = CONNECTORS  # that make the text it reads, or STAGE2_CONNECTORS
    source: Streams[LatentShape] | None = None  # of latents that it upsamples and noises; None: it begins as noise
    begins_as: Streams[int | None] = NO_CONDITIONS  # those whose latents are noised; None: all is noise
    noise: str | None = None  # file of the initial noise; None: it is drawn
    keep_audio: bool = False  # the audio is that of the source
    source_keyframes: int = 0  # generated keyframes among its latents, which those of this stage begin as
    between_keyframes: bool = False  # it generates further ones between them, in windows of whole segments
    follows_source: bool = False  # the video of the source is a reference, behind all others
    audio_conditions: int = 0  # each as long as the stage's audio
    condition_slices: Streams[tuple[ConditionSlice, ...]] = NO_SLICES  # of the placed videos, and of the audio
    frozen: Streams[bool] = NEITHER  # the stream is a condition as a whole: nothing of it is generated
    references: References | None = None  # None: tokens attend to all tokens alike
    x0_sigma: X0Sigma = "token"
    cross_timestep: CrossTimestep = "gate"
    marks_keyframes: bool = False  # the denoiser is told which tokens' latent frame is one frame of pixels
    sampler: str = EULER
    eta: float = 1.0  # the fraction of fresh noise, where the sampler draws some
    first_block_cache: float | None = None  # the change of the first layer up to which others are skipped; None: never

    @property
    def steps(self) -> int:
        """The number of denoising steps."""
        return len(self.sigmas) - 1

    @property
    def passes(self) -> tuple[Pass, ...]:
        """All passes; one step at least has them."""
        return next(iter(self.pass_counts))

    @property
    def pass_counts(self) -> dict[tuple[Pass, ...], int]:
        """The number of steps with each set of passes, that of all passes first."""
        counts = Counter(self.step_passes) or Counter({(Pass.COND,): self.steps})
        return dict(sorted(counts.items(), key=lambda count: [each not in count[0] for each in Pass]))

    @property
    def forwards(self) -> int:
        """The number of the denoiser's forwards in all steps."""
        sampler, ends = find_sampler(self.sampler), self.steps and self.sigmas[-1] == 0
        return self.steps * sampler.forwards + (sampler.at_end if ends else 0)

    def window(self, number: int) -> "Stage":
        """The stage for the latents of one window, which is what its programs see; itself if there is one alone."""
        window = self.windows[number]
        if len(self.windows) == 1 and window.segments is None:
            return self
        geometry = window.geometry(self.geometry)
        if window.segments is None:
            conditions = window_slices(self.condition_slices, *self.window_tokens(number)[:2])
        else:
            first = window.first_frame(self.geometry)
            conditions = segment_slices(self.placed_videos, window.segments, geometry, first, self.frozen.audio)
        (videos, channels, *_), (_, audio_channels, _, mels) = self.shapes
        size = geometry.frames, geometry.height, geometry.width
        return replace(
            self,
            geometry=geometry,
            shapes=Streams((videos, channels, *size), (videos, audio_channels, geometry.audio_frames, mels)),
            condition_slices=conditions,
        )

    @cached_property
    def largest_window(self) -> "Stage":
        """The stage for the latents of the window that has the most; all have as many, but between keyframes."""
        if not self.between_keyframes:
            return self.window(0)
        return self.window(max(range(len(self.windows)), key=lambda number: self._tokens_at_once(number)[0]))

    @property
    def turns(self) -> float:
        """The number of windows, a smaller one as the part that it is of the largest."""
        lengths = [window.latents.video.stop - window.latents.video.start for window in self.windows]
        return len(lengths) if len(set(lengths)) == 1 else sum(lengths) / max(lengths)

    @property
    def tile_geometry(self) -> Geometry:
        """The latents that a forward computes, of the largest tile."""
        return self.tiles.geometry(self.geometry) if self.tiles else self.geometry

    @property
    def tile_turns(self) -> float:
        """The number of forwards in place of one over all latents, a shorter one as its part of the longest."""
        return self.tiles.turns if self.tiles else 1

    def first_alike(self, number: int) -> int:
        """The first window that has the same programs as this one: all have, but between keyframes."""
        if not self.between_keyframes:
            return 0
        sizes = [self._tokens_at_once(other) for other in range(number + 1)]
        return sizes.index(sizes[number])

    def _tokens_at_once(self, number: int) -> tuple[int, int]:
        geometry = self.window(number).geometry
        return geometry.video_tokens, geometry.audio_frames

    def window_tokens(self, number: int) -> ClipWindow:
        """A window in tokens of the clip."""
        cells = self.geometry.height * self.geometry.width
        (video, audio), (seen, heard), segments = self.windows[number]
        latents = Streams(slice(video.start * cells, video.stop * cells), audio)
        return ClipWindow(latents, Streams(seen * cells, heard), segments)

    @property
    def token_shapes(self) -> Streams[tuple[int, int]]:
        """Tokens, with those behind the grid, and channels of each stream."""
        (_, _, channels), (_, tokens, features) = token_shapes(1, self.shapes)
        return Streams((self.geometry.video_tokens, channels), (tokens, features))

    @property
    def kept_keyframes(self) -> int:
        """Generated keyframes beside its result, of this stage or of those before; those of a round are all of them."""
        return 2 * self.geometry.generated if self.between_keyframes else self.geometry.generated

    @property
    def generated_tokens(self) -> slice:
        """The video tokens of the keyframes that it generates."""
        end = sum(self.geometry.token_counts[:2])
        return slice(end - self.geometry.generated * self.geometry.height * self.geometry.width, end)

    @property
    def behind_tokens(self) -> int:
        """The video tokens behind the grid that are kept beside its clip: all where it begins with some, else those of
        generated keyframes."""
        if self.begins_behind:
            return self.geometry.video_tokens - self.geometry.grid_tokens
        return (self.generated_tokens.stop - self.generated_tokens.start) if self.steps else 0

    @property
    def begins_behind(self) -> bool:
        """Whether tokens behind the grid begin as latents of the source."""
        return self.follows_source or self.source_keyframes > 0

    @property
    def holds_keyframes(self) -> bool:
        """Whether the keyframes of the source are given, drawn again at its size: in tiles none are generated."""
        return self.tiles is not None and self.source_keyframes > 0 and not self.between_keyframes

    @property
    def holds_latents(self) -> bool:
        """Whether latents of the clip itself are conditions: those of the window before, the source, or its audio."""
        return any(condition.source == HELD for of in self.condition_slices for condition in of)

    @property
    def draws_noise(self) -> bool:
        """Whether a program draws noise: for the clip, or for tokens behind its grid."""
        return self.noise is None or self.geometry.video_tokens > self.geometry.grid_tokens


class InitialLatents(NamedTuple):
    """Saved latents that a run starts from."""

    shapes: Streams[LatentShape]  # of one video's in a file
    fps: float
    keyframes: int = 0  # that were generated beside it


def upsampled_spec(spec: RunSpec, arch: Arch, by: UpsampleFactors, source: InitialLatents) -> RunSpec:
    """The request for the upsampled clip of these latents."""
    num_frames, height, width = arch.compression.clip_size(*by.upsampled(*source.shapes.video[2:]))
    fps, rate = source.fps * _frame_rate_factor(spec, by), (num_frames - 1) / max(spec.num_frames - 1, 1)
    shown = tuple(replace(each, frame=round(max(each.frame, 0) * rate) or each.frame) for each in spec.conditions)
    return replace(spec, num_frames=num_frames, height=height, width=width, fps=fps, conditions=shown)


def _frame_rate_factor(spec: RunSpec, by: UpsampleFactors) -> int:
    """The factor of the upsampled clip's frame rate."""
    return 1 if spec.second_stage.temporal_upsample == "duration" else by.time


def measure_stages(
    spec: RunSpec, arch: Arch, videos: Sequence[Video], by: UpsampleFactors | None, source: InitialLatents | None
) -> tuple[StageSize, ...]:
    """Sizes of one stage, or of two with an upsampler of factors `by`, the second from the latents `source` if there
    are some. Raises `UsageError` for a size that the upsampler cannot make, and for conditions that a first stage
    cannot have."""
    size = spec.num_frames, spec.height, spec.width
    rounds = bool(by and spec.second_stage.keyframe_windows)
    if by and rounds:
        check_rounds(spec, by, source and source.keyframes)
    last = _measure(spec, arch, videos, size, spec.fps, by, source and source.keyframes)
    if by is None:
        return (last,)
    if by.time > 1 and any((condition.num_frames or 1) > 1 for condition in spec.conditions):
        sentence = "a video cannot be shown where the upsampler adds frames: the first stage has fewer"
        raise UsageError(sentence, f"{typed('second_stage.upsampler', 'FILE')} of a spatial one, or an image")
    if by.time > _frame_rate_factor(spec, by) and spec.audio:
        sentence = "audio cannot be given where the upsampler stretches the clip: the first stage is shorter"
        raise UsageError(sentence, f"{typed('second_stage.temporal_upsample', 'fps')}, or no {option_name('audio')}")
    small, fps = stage1_size(*size, by, arch.compression), spec.fps / _frame_rate_factor(spec, by)
    return _measure(spec, arch, videos, small, fps, None), last


def _measure(
    spec: RunSpec,
    arch: Arch,
    videos: Sequence[Video],
    size: tuple[int, int, int],
    fps: float,
    last: UpsampleFactors | None,
    known: int | None = None,
) -> StageSize:
    """Sizes of a stage for a clip of this size (frames, height, width); `last`: the factors before the second of two
    stages; `known`: the keyframes of the latents that it begins with, None: they are not made yet. Raises `UsageError`
    if references at their scale have no whole latents."""
    placed = place_videos(spec, videos, arch.compression, size[0], last is not None)
    shown = chain(*(video.keyframes(arch.compression.frames) for video in placed))
    compression, in_tiles = arch.compression.frames, last is not None and spec.second_stage.in_tiles
    segments = known or 0 if last and spec.second_stage.keyframe_windows else 0
    if segments:
        keyframes = keyframes_of_rounds(size[0], segments, compression)
    elif in_tiles and known is not None and known != spec.keyframes:
        keyframes = segment_ends(size[0], known, compression) if known else []
    else:
        keyframes = generated_keyframes(spec, size[0])
    references = [video.reference for video in placed if video.reference]
    if last and spec.second_stage.follow_first:
        references.append(ReferenceGrid(arch.compression.latents(size[0]), ReferenceScale(last.up // last.down, 1)))
    if spec.windows > 1 and not segments and (keyframes or references):
        raise UsageError("tokens beside a clip cannot be split into windows", typed("windows", 1))
    behind = (*shown, *keyframes), tuple(references), segments or (0 if in_tiles else len(keyframes))
    geometry = clip_geometry(*size, fps, arch.compression, arch.transformer.scales, *behind)
    frames, audio_frames = geometry.frames * spec.running.video, geometry.audio_frames * spec.running.audio
    by_segments = bool(segments or spec.keyframe_segments or (in_tiles and known))
    geometry = replace(geometry, frames=frames, audio_frames=audio_frames, by_segments=by_segments)
    for _, (downscale, _) in references:
        if geometry.height % downscale or geometry.width % downscale:
            multiple = downscale * arch.compression.pixels
            height, width = (max(round(side / multiple), 1) * multiple for side in size[1:])
            sentence = f"references of 1/{downscale} of {size[2]}x{size[1]} do not divide into this model's latents"
            raise UsageError(sentence, f"nearest, of the first stage: {width}x{height}")
    channels = Streams(arch.transformer.in_channels, arch.transformer.audio_in_channels)
    shapes = file_shapes(geometry, channels, arch.audio_vae.latent_mels)
    windows = plan_keyframe_windows(spec, geometry) if segments else plan_windows(spec, geometry)
    at_once = windows[0].geometry(geometry) if len(windows) > 1 else geometry
    tiles = plan_stage_tiles(spec, at_once, keyframes) if last else None
    return StageSize(geometry, shapes, placed, windows, tiles)


def build_stages(
    spec: RunSpec,
    inputs: PlanInputs,
    sizes: Sequence[StageSize],
    source: InitialLatents | None,
    guided: ShardingPlan,
    unguided: ShardingPlan,
) -> tuple[Stage, ...]:
    """The stages of a run, or the second one alone from `source`. `guided` is the sharding for all passes, `unguided`
    for one."""
    if len(sizes) == 1:
        return (_first_stage(spec, inputs, FINAL, sizes[0], guided),)
    # The second stage reuses the placed weights, except those that its LoRAs are merged into.
    first = _first_stage(spec, inputs, FIRST, sizes[0], guided if STAGE2_DENOISER in inputs.lora_deltas else unguided)
    before = source or InitialLatents(first.shapes, first.geometry.fps, first.kept_keyframes)
    second = _second_stage(spec, inputs, sizes[1], before, unguided)
    return (second,) if source else (first, second)


def _first_stage(spec: RunSpec, inputs: PlanInputs, name: str, size: StageSize, sharding: ShardingPlan) -> Stage:
    """The stage that starts from noise."""
    arch, geometry = inputs.checkpoint.arch, size.at_once
    guidance, sigmas = recipe_guidance(spec, arch), _first_sigmas(spec, arch, geometry)
    passes, blocks = first_passes(spec, arch, geometry), spec.stg_blocks or ()
    stage = Stage(name, *size, sigmas, sharding, passes, guidance, blocks, noise=spec.initial_noise)
    assert spec.sampler is not None
    stage = replace(stage, sampler=spec.sampler, eta=spec.eta, first_block_cache=spec.first_block_cache)
    _check_cache(stage)
    return _beginning(_with_conditions(stage, spec, inputs), spec, inputs)


def _beginning(stage: Stage, spec: RunSpec, inputs: PlanInputs) -> Stage:
    """The stage as it begins: from an edited clip that is kept in part, else from noise."""
    number = edited(spec)
    if number is None or noise_level(spec) == 1:
        return stage
    seen = [shown.number for shown in stage.placed_videos]
    heard = [shown for shown in seen if inputs.input_videos[shown].audio]
    return replace(stage, begins_as=Streams(seen.index(number), heard.index(number) if number in heard else None))


def _check_cache(stage: Stage) -> None:
    """Raise `UsageError` for a first-block cache of steps with several forwards, or of other passes each."""
    if stage.first_block_cache is None:
        return
    sentence = f"{typed('first_block_cache', f'{stage.first_block_cache:g}')} compares steps with one another, and"
    if find_sampler(stage.sampler).forwards > 1:
        raise UsageError(f"{sentence} those of {stage.sampler} have two forwards", typed("sampler", EULER))
    if len(stage.pass_counts) > 1:
        keys = {"guidance_interval": "0,1", "stg_every": 1, "modality_every": 1}
        alike = " ".join(typed(key, value) for key, value in keys.items())
        raise UsageError(f"{sentence} these have different passes", alike)


def _first_sigmas(spec: RunSpec, arch: Arch, geometry: Geometry) -> np.ndarray:
    """The noise levels of the first stage, float32 [steps + 1]: its schedule, or of an edited clip that is kept in part
    the end of it, from the noise level of that clip."""
    sigmas, first = _schedule_sigmas(spec, arch, geometry), np.float32(noise_level(spec))
    return sigmas if first == 1 else np.concatenate([[first], sigmas[sigmas < first]])


def _schedule_sigmas(spec: RunSpec, arch: Arch, geometry: Geometry) -> np.ndarray:
    if spec.sigmas is not None:
        return np.asarray(spec.sigmas, np.float32)
    assert spec.num_inference_steps is not None
    own = geometry.video_tokens if spec.running.video else REFERENCE_TOKENS
    tokens = own if spec.schedule_tokens is None else spec.schedule_tokens
    return schedule_of(spec, arch).sigmas(spec.num_inference_steps, tokens)


def first_passes(spec: RunSpec, arch: Arch, geometry: Geometry) -> tuple[tuple[Pass, ...], ...]:
    """The passes of each step of the first stage: all that guidance needs where the noise level is in its interval,
    elsewhere the conditional one. Of the guided steps, every n-th has those that need not be in each. Raises
    `UsageError` for guidance without a step."""
    passes, sigmas = needed_passes(recipe_guidance(spec, arch)), _first_sigmas(spec, arch, geometry)[:-1]
    every = {Pass.PERTURBED: spec.stg_every, Pass.ISOLATED: spec.modality_every}
    low, high = np.asarray(spec.guidance_interval, np.float32)
    guided = (low <= sigmas) & (sigmas <= high)
    if len(passes) > 1 and not guided.any():
        levels = f"the noise levels of its {len(sigmas)} steps are {', '.join(f'{sigma:.3g}' for sigma in sigmas)}"
        sentence = f"guidance_interval {spec.guidance_interval} has no step: {levels}"
        raise UsageError(sentence, f"another interval; without guidance: {typed('guidance.video.guidance_scale', 1)}")
    numbers = np.cumsum(guided) - 1  # of the guided steps
    return tuple(
        tuple(each for each in passes if each is Pass.COND or (inside and number % every.get(each, 1) == 0))
        for inside, number in zip(guided, numbers, strict=True)
    )


def schedule_of(spec: RunSpec, arch: Arch) -> Schedule:
    """The schedule of the denoiser: that of its checkpoint. A denoiser from a file of its own has the published one if
    the checkpoint's scheduler computes no noise levels, as that of a distilled one."""
    own, published = arch.scheduler, PRESETS[arch.model_version].scheduler
    computes = own.use_dynamic_shifting or own.shift_terminal
    return own if computes or spec.transformer is None else published


def _second_stage(
    spec: RunSpec, inputs: PlanInputs, size: StageSize, source: InitialLatents, sharding: ShardingPlan
) -> Stage:
    """The stage that upsamples and refines."""
    deltas, sigmas = inputs.lora_deltas, np.asarray(spec.second_stage.sigmas or UNREFINED, np.float32)
    rounds = bool(spec.second_stage.keyframe_windows)
    upsampled = inputs.upsampling and inputs.upsampling.time == 1 and size.geometry.generated
    stage = Stage(
        FINAL if len(sigmas) > 1 else UPSAMPLED,
        *size,
        sigmas,
        sharding,
        network=STAGE2_DENOISER if STAGE2_DENOISER in deltas else DENOISER,
        connectors=STAGE2_CONNECTORS if STAGE2_CONNECTORS in deltas else CONNECTORS,
        source=source.shapes,
        source_keyframes=source.keyframes if rounds or upsampled or size.tiles else 0,
        between_keyframes=rounds,
        follows_source=bool(spec.second_stage.follow_first),
        keep_audio=bool(spec.second_stage.keep_audio or spec.second_stage.freeze_audio),
        sampler=spec.second_stage.sampler or EULER,
        eta=spec.eta,
    )
    stage = _with_conditions(stage, spec, inputs)
    if rounds:  # it hears the latents, also those of audio that was given
        stage = replace(stage, audio_conditions=0, condition_slices=stage.condition_slices._replace(audio=()))
    slices, frozen = stage.condition_slices, stage.frozen
    if stage.holds_keyframes:
        end, cells = sum(size.geometry.token_counts[:2]), size.geometry.height * size.geometry.width
        start = end - stage.source_keyframes * cells
        slices = slices._replace(video=(*slices.video, ConditionSlice(HELD, slice(start, end), start, 1.0)))
    if stage.follows_source:
        end = size.geometry.video_tokens
        start = end - size.geometry.token_counts[-1]
        slices = slices._replace(video=(*slices.video, ConditionSlice(HELD, slice(start, end), start, 1.0)))
    if spec.second_stage.freeze_audio and spec.running.audio and (rounds or not spec.audio):
        whole = ConditionSlice(HELD, slice(0, size.geometry.audio_frames), 0, 1.0)
        slices, frozen = slices._replace(audio=(whole,)), frozen._replace(audio=True)
    return replace(stage, condition_slices=slices, frozen=frozen)


def _with_conditions(stage: Stage, spec: RunSpec, inputs: PlanInputs) -> Stage:
    strengths = [1.0] if spec.audio else []
    strengths += [placed.strength for placed in stage.placed_videos if inputs.input_videos[placed.number].audio]
    edit = edit_of(spec, inputs.input_videos, stage.geometry)
    arch = inputs.checkpoint.arch
    by_segment = spec.keyframe_segments or spec.second_stage.keyframe_windows or stage.tiles
    as_diffusers = spec.follows_diffusers and not by_segment  # its pipelines of these agree with ltx-core
    slices = condition_slices(stage.placed_videos, strengths, stage.geometry, arch.compression, edit)
    whole = Streams(
        *(fully_conditioned(*pair) for pair in zip(slices, (shape[0] for shape in stage.token_shapes), strict=True))
    )
    return replace(
        stage,
        audio_conditions=len(strengths),
        condition_slices=slices,
        frozen=whole._replace(video=whole.video and edit is not None),
        references=reference_weights(spec, inputs.input_videos, stage.placed_videos, stage.geometry),
        x0_sigma="stream" if as_diffusers else "token",
        cross_timestep="always" if spec.follows_diffusers else "gate",
        marks_keyframes=arch.transformer.use_keyframes_abs_pos_embedding and not as_diffusers,
    )


def recipe_guidance(spec: RunSpec, arch: Arch) -> Streams[Guidance]:
    """Guidance of the first stage, for generated streams. Input audio has none."""
    asked = (vars(spec.guidance.video), vars(spec.guidance.audio))
    guidance = Streams(*(Guidance(*(scale for scale in stream.values() if scale is not None)) for stream in asked))
    if not all(spec.running):  # a stream alone has none to come closer to
        guidance = Streams(*(replace(stream, modality_scale=1.0) for stream in guidance))
    led = spec.running._replace(audio=spec.running.audio and not spec.audio)
    guidance = Streams(*(stream if wanted else NO_GUIDANCE for stream, wanted in zip(guidance, led, strict=True)))
    if not spec.stg_blocks or (spec.follows_diffusers and not arch.transformer.perturbed_attn):
        return Streams(*(replace(stream, stg_scale=0.0) for stream in guidance))
    return guidance
