"""Checks of a request that need no checkpoint."""

import re
import secrets
from collections import Counter
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from functools import reduce
from itertools import pairwise
from math import isnan
from os.path import expanduser
from pathlib import Path
from typing import Any, NamedTuple

from ltx2_cli.errors import UsageError
from ltx2_cli.request.spec import DType, Offload, RunSpec, WeightType
from ltx2_cli.request.spelling import of_condition, option_name, short_name, typed

SAMPLERS = Path(__file__).parents[1] / "diffusion" / "samplers"  # a file each
MAX_STEPS = 1000
MAX_VIDEOS = 1000
LEAST_STEP = 1e-6  # smallest difference of noise levels
MAX_FPS = 240
MAX_SIDE = 2**14  # pixels
MAX_WINDOWS = 1000
MAX_SPATIAL_TILES = 8  # along a side
MAX_FRAMES = 2**14 + 1
SHOWN = ("image", "video", "clip")  # kinds of conditions that have a place in a clip
CLIP_TYPES = {True: "mp4", False: "wav"}  # of clips, with a video and without one
MAX_KEYFRAMES = 100
MAX_CRF = 51  # of H.264
MAX_REFERENCE_SCALE = 99  # published LoRAs follow references of half the size, or of a quarter
MAX_TOKENS = 2**17  # of text; Gemma-3's context length
MAX_SEED = 2**32 - 1
MAX_SCALE = 100  # of guidance; published recipes use 1 to 7
# Characters that steer a terminal, end a line or turn its writing round
STEERING = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
SURROGATE = re.compile("[\ud800-\udfff]")  # a byte that is no UTF-8, as Python decodes it
MAY_BE_EMPTY = ("prompt", "negative_prompt", "checkpoint")  # the prompt has its own check


Problem = tuple[str, str]  # the dotted key, and a sentence with what to type instead


class Range(NamedTuple):
    """Legal numbers of a key: `lowest` to `highest`; with `step`, only multiples of it plus `first`."""

    lowest: float
    highest: float
    step: int = 0
    first: int = 0

    def problem(self, value: float, typed: str) -> str:
        """A sentence on the rule that `value` breaks, with the nearest legal numbers after the `typed` option; empty if
        it is legal."""
        if not self.lowest <= value <= self.highest:
            nearest = self.highest if value > self.highest else max(self.lowest, 0 if isnan(value) else self.lowest)
            return f"not in {self.lowest:.7g} to {self.highest:.7g}; nearest: {typed}{nearest:.7g}"
        if not self.step or value % self.step == self.first:
            return ""
        rule = f"{self.step}k + {self.first}" if self.first else f"a multiple of {self.step}"
        below = value - (value - self.first) % self.step
        return f"not {rule}; nearest: {typed}{below} or {below + self.step}"


NOISE_LEVELS = Range(0.01, 1)  # at which a part of an edited clip may begin
RANGES = {
    "height": Range(32, MAX_SIDE, 32),
    "width": Range(32, MAX_SIDE, 32),
    "num_frames": Range(1, MAX_FRAMES, 8, 1),
    "fps": Range(1, MAX_FPS),
    "windows": Range(1, MAX_WINDOWS),
    "window_overlap": Range(0, 60),
    "segment_fade": Range(0, 60),
    "keyframes": Range(0, MAX_KEYFRAMES),
    "second_stage.keyframe_windows": Range(1, MAX_WINDOWS),
    "second_stage.spatial_tiles": Range(1, MAX_SPATIAL_TILES),
    "second_stage.temporal_tiles": Range(1, MAX_WINDOWS),
    "num_videos": Range(1, MAX_VIDEOS),
    "loudness": Range(-70, 0),
    "image_crf": Range(0, MAX_CRF),
    "image_strength": Range(0, 1),
    "reference_strength": Range(0, 1),
    "num_inference_steps": Range(1, MAX_STEPS),
    "schedule_tokens": Range(1, 10**9),
    "eta": Range(0, 1),
    **{
        f"guidance.{stream}.{name}": Range(-MAX_SCALE, MAX_SCALE)
        for stream in ("video", "audio")
        for name in ("guidance_scale", "stg_scale", "modality_scale")
    },
    **{f"guidance.{stream}.guidance_rescale": Range(0, 1) for stream in ("video", "audio")},
    "stg_every": Range(1, MAX_STEPS),
    "modality_every": Range(1, MAX_STEPS),
    "first_block_cache": Range(0, 1),
    "nag_scale": Range(1, MAX_SCALE),
    "nag_tau": Range(1, MAX_SCALE),
    "nag_alpha": Range(0, 1),
    "max_sequence_length": Range(1, MAX_TOKENS),
    "vae_memory_gb": Range(1e-6, 1e6),  # GB
    "sharding.bf16_tile_sublanes": Range(1, 1024),
}


def sampler_names() -> list[str]:
    """The names of all samplers."""
    return sorted(path.stem for path in SAMPLERS.glob("[a-z]*.py"))


def validate(spec: RunSpec, later: Collection[str] = ()) -> None:
    """Raise `UsageError` with all problems of `spec`, a line each with what to type instead; but those of the keys
    `later`."""
    if sentences := list(dict.fromkeys(sentence for key, sentence in spec_problems(spec) if key not in later)):
        raise UsageError(sentences, "")


def spec_problems(spec: RunSpec) -> Iterator[Problem]:
    """All problems of `spec`."""
    yield from _wrong_text(spec)
    yield from _wrong_numbers(spec)
    yield from (("segments", sentence) for sentence in _wrong_segments(spec))
    yield from (("windows", sentence) for sentence in _wrong_windows(spec))
    yield from (("keyframe_segments", sentence) for sentence in _wrong_segments_of_keyframes(spec))
    yield from (("seed", sentence) for sentence in _wrong_seeds(spec))
    yield from _wrong_process(spec)
    yield from (("conditions", sentence) for sentence in _wrong_conditions(spec))
    yield from _wrong_streams(spec)
    yield from _wrong_files(spec)


def random_seed(spec: RunSpec) -> int:
    """A random seed that is legal for the request."""
    return secrets.randbelow(MAX_SEED - spec.num_videos + 2)


def _wrong_text(spec: RunSpec) -> Iterator[Problem]:
    second = spec.second_stage
    loras = [*(("lora", lora) for lora in spec.lora), *(("second_stage.lora", lora) for lora in second.lora or ())]
    given = [("conditions", condition.path) for condition in spec.conditions]
    given += [("audio", spec.audio.path)] if spec.audio else []
    given += [("segments", segment.prompt) for segment in spec.segments]
    for key, value in [*vars(spec).items(), ("second_stage.upsampler", second.upsampler), *loras, *given]:
        if not isinstance(value, str):
            continue
        if not value and key not in MAY_BE_EMPTY:
            yield key, f"{short_name(key)} is empty; leave it out, or name one"
        if "\0" in value:
            yield key, f"{short_name(key)} {value!r} has a NUL in it; leave it out"
        if SURROGATE.search(value):
            yield key, f"{short_name(key)} {value!r} is not text in UTF-8; type or save it as UTF-8"
    if not spec.prompt.strip():
        example = typed("prompt", '"..."')
        yield "prompt", f"the prompt is empty; say what to show: {example}"


def _wrong_segments(spec: RunSpec) -> Iterator[str]:
    starts, seconds = [segment.start for segment in spec.segments], spec.num_frames / max(spec.fps, 1)
    for segment, before in zip(spec.segments, [0.0, *starts], strict=False):
        if not segment.prompt.strip():
            yield f"the segment at {segment.start:g} s has no prompt; say what to show, or leave it out"
        if not 0 < segment.start < seconds:
            yield (
                f"segment {segment.start:g} s begins outside the clip of {seconds:.2f} s; up to the first segment, the"
                " prompt counts"
            )
        elif segment.start <= before:
            yield f"segment {segment.start:g} s begins no later than the one before it, {before:g} s; order them"


def _wrong_windows(spec: RunSpec) -> Iterator[str]:
    if spec.windows == 1:
        return
    if spec.window_overlap == 0:
        yield f"windows that do not overlap make clips of their own; nearest: {typed('window_overlap', 1)}"
    if not spec.running.video:
        yield f"windows are of video, and none is made: {typed('windows', 1)}"
    if spec.keyframes:
        yield f"keyframes beside a clip cannot be split into windows: {typed('windows', 1)}, or {typed('keyframes', 0)}"
    for condition in spec.conditions:
        if condition.kind not in ("image", "video"):
            yield f"a {condition.kind} as input cannot be split into windows: {typed('windows', 1)}"
        elif condition.frame % spec.num_frames:
            shown = f"{condition.kind} {condition.path} is shown at frame {condition.frame}"
            yield f"{shown}, and windows show input at the beginning alone: frame 0, or {typed('windows', 1)}"


def _wrong_numbers(spec: RunSpec) -> Iterator[Problem]:
    for key, legal in RANGES.items():
        value: Any = reduce(lambda section, name: vars(section)[name], key.split("."), spec)
        if value is not None and (problem := legal.problem(value, typed(key))):
            yield key, f"{short_name(key)} {value} is {problem}"


def _wrong_segments_of_keyframes(spec: RunSpec) -> Iterator[str]:
    """Keyframes lie where latents end."""
    step, lengths = RANGES["num_frames"].step, list(spec.keyframe_segments or ())
    legal = [min(max(round(length / step), 1) * step, MAX_FRAMES - 1) for length in lengths]
    if lengths != legal:
        sentence = (
            f"keyframe_segments {lengths} are not lengths of {step} to {MAX_FRAMES - 1} frames in steps of {step}"
        )
        yield f"{sentence}; nearest: {typed('keyframe_segments', legal)}"


def _wrong_seeds(spec: RunSpec) -> Iterator[str]:
    for seed in dict.fromkeys(spec.seed or ()):
        if not 0 <= seed <= MAX_SEED - max(spec.num_videos - 1, 0):
            yield f"seed {seed} is out of range, video i counts as seed + i; legal: {typed('seed', 0)} to {MAX_SEED}"
    if spec.seed == ():
        yield f"seed is a list of none; for example: {typed('seed', 7)}, or {typed('seed', '0..3')}"
    elif len(spec.seed or ()) * max(spec.num_videos, 0) > MAX_VIDEOS:
        nearest = f"{typed('seed', f'0..{MAX_VIDEOS - 1}')} {typed('num_videos', 1)}"
        yield f"more than {MAX_VIDEOS} clips are asked for; nearest: {nearest}"
    elif len(set(spec.seeds)) < len(spec.seeds):
        twice = next(seed for place, seed in enumerate(spec.seeds) if seed in spec.seeds[:place])
        apart = "; video i counts as seed + i" * (spec.num_videos > 1)
        example = f"{typed('seed', '0..3')} {typed('num_videos', 1)}"
        yield f"seed {twice} is there twice{apart}; for example: {example}"


def _wrong_process(spec: RunSpec) -> Iterator[Problem]:
    if spec.dtype is DType.float32 and spec.weights is not WeightType.auto:
        half, same = typed("dtype", "bfloat16"), typed("weights", "auto")
        yield "weights", f"weights {spec.weights} are less exact than dtype float32; nearest: {half}, or {same}"
    known = sampler_names()
    for key, sampler in (("sampler", spec.sampler), ("second_stage.sampler", spec.second_stage.sampler)):
        if sampler is not None and sampler not in known:
            (nearest,) = get_close_matches(sampler, known, 1, cutoff=0)
            names = ", ".join(f"`{name}`" for name in known)
            yield key, f"unknown sampler `{sampler}`, known are {names}; nearest: {typed(key, nearest)}"
    if spec.offload is not Offload.none and not spec.scan_layers:
        scanned, resident = typed("scan_layers", value=True), typed("offload", "none")
        sentence = f"offload {spec.offload} copies a layer in each turn of a loop, and scan_layers false has no loop"
        yield "offload", f"{sentence}; nearest: {scanned}, or {resident}"
    if spec.sigmas is not None:
        yield from _wrong_sigmas(spec.sigmas, spec.num_inference_steps)
    if spec.second_stage.sigmas:
        yield from _wrong_sigmas(spec.second_stage.sigmas, None, "second_stage.sigmas", (0.9, 0.7, 0.4, 0))
    low, high = spec.guidance_interval
    if not 0 <= low <= high <= 1:
        within = sorted(level if 0 <= level <= 1 else float(level > 1) for level in (low, high))
        sentence = f"guidance_interval {[low, high]} is not two noise levels from 0 to 1, the lower one first"
        yield "guidance_interval", f"{sentence}; nearest: {typed('guidance_interval', within)}"
    blocks = spec.stg_blocks or ()
    if min(blocks, default=0) < 0:
        first = typed("stg_blocks", [0])
        yield "stg_blocks", f"stg_blocks {list(blocks)} has a negative block; blocks count from 0: {first}"
    if len(set(blocks)) < len(blocks):
        once = typed("stg_blocks", list(dict.fromkeys(blocks)))
        yield "stg_blocks", f"stg_blocks {list(blocks)} has a block twice; nearest: {once}"


def _wrong_conditions(spec: RunSpec) -> Iterator[str]:
    yield from _wrong_places(spec)
    yield from _wrong_references(spec)
    yield from _wrong_clips(spec)
    for condition in spec.conditions:
        path, count = condition.path, condition.num_frames
        place = f"{path}@{condition.frame}:" if condition.kind in SHOWN else f"{path}:"
        strength = 1 if condition.strength is None else condition.strength
        if problem := Range(0, 1).problem(strength, of_condition(condition.kind, place)):
            yield f"strength {strength:g} of {path} is {problem}"
        if count is not None and (problem := Range(1, spec.num_frames, 8, 1).problem(count, "num_frames: ")):
            yield f"num_frames {count} of {path} is {problem}"
        if condition.noise_level != 1 and condition.kind != "clip":
            yield f"noise_level {condition.noise_level:g} of {path} is for an edited clip; kind: clip, or its strength"
        if not Path(expanduser(path)).exists():
            yield f"there is no {condition.kind} {path}; check the path"


def _wrong_places(spec: RunSpec) -> Iterator[str]:
    shown: dict[int, str] = {}
    for condition in (condition for condition in spec.conditions if condition.kind in SHOWN):
        path, frame, place_of = condition.path, condition.frame, of_condition(condition.kind, f"{condition.path}@")
        if problem := Range(-spec.num_frames, spec.num_frames - 1).problem(frame, place_of):
            yield f"frame {frame} of {path} is {problem}"
        elif (place := frame % spec.num_frames) in shown:
            other = place + 1 if place + 1 < spec.num_frames else place - 1
            yield f"{shown[place]} and {path} are both shown at frame {place}; nearest: {place_of}{other}"
        else:
            shown[place] = path


def _wrong_references(spec: RunSpec) -> Iterator[str]:
    kinds = Counter(condition.kind for condition in spec.conditions)
    if not kinds["reference"] and (kinds["mask"] or spec.reference_strength != 1):
        asked = "reference_mask" if kinds["mask"] else f"reference_strength {spec.reference_strength:g}"
        yield f"{asked} is of a reference, and none is given; name one: {of_condition('reference', 'FILE')}"
    if kinds["mask"] > 1:
        yield f"{kinds['mask']} masks of references are given; nearest: one, and a video may change"
    for condition in spec.conditions:
        is_mask, legal = condition.kind == "mask", Range(1, MAX_REFERENCE_SCALE)
        if condition.kind not in SHOWN and (condition.frame or (is_mask and condition.strength not in (None, 1))):
            keys = "frame or strength" if is_mask else "frame"
            yield f"the {condition.kind} {condition.path} has no {keys} of its own; leave it out"
        for key, scale in (("downscale", condition.downscale), ("temporal_scale", condition.temporal_scale)):
            if scale is not None and (problem := legal.problem(scale, f"{key}: ")):
                yield f"{key} {scale} of {condition.path} is {problem}"


def _wrong_clips(spec: RunSpec) -> Iterator[str]:
    clips = [condition for condition in spec.conditions if condition.kind == "clip"]
    if clips and spec.audio:
        nearest = f"no {option_name('audio')}"
        yield f"{clips[0].path} has audio of its own, and {spec.audio.path} is given; nearest: {nearest}"
    if len(clips) > 1:
        yield f"{clips[0].path} and {clips[1].path} are both to be changed; nearest: one of them"
    for clip in clips:
        begin, end = clip.regenerate
        if not 0 <= begin < end:
            nearest = f"regenerate: [{max(begin, 0)}, {max(begin, 0) + 1}]"
            yield f"of {clip.path} the frames {begin} to {end} are to be regenerated; nearest: {nearest}"
        if problem := NOISE_LEVELS.problem(clip.noise_level, "noise_level: "):
            yield f"noise_level {clip.noise_level:g} of {clip.path} is {problem}"
        elif clip.noise_level < 1 and (spec.keyframes or spec.keyframe_segments):
            off = typed("keyframes", 0) if spec.keyframes else typed("keyframe_segments", [])
            yield f"generated keyframes begin as noise, and {clip.path} at a noise level of {clip.noise_level:g}; {off}"
        if clip.frame:
            yield f"{clip.path} is changed, not shown at frame {clip.frame}; nearest: frame: 0"


def _wrong_streams(spec: RunSpec) -> Iterator[Problem]:
    if spec.audio and spec.streams != "both":
        off = option_name("streams/video" if spec.running.video else "streams/audio")
        yield "audio", f"the audio {spec.audio.path} is for a clip with a video that follows it; leave out {off}"
    clips = [condition.path for condition in spec.conditions if condition.kind == "clip"]
    if clips and spec.streams != "both":
        yield (
            "streams",
            f"{clips[0]} is to be changed, and {spec.streams} alone is made; nearest: {typed('streams', 'both')}",
        )
    elif spec.conditions and not spec.running.video:
        condition = spec.conditions[0]
        off = option_name("streams/audio")
        yield "conditions", f"{condition.path} is to be seen, and no video is made; leave it out, or {off}"


def _wrong_sigmas(
    sigmas: tuple[float, ...], steps: int | None, key: str = "sigmas", good: tuple[float, ...] = (1, 0.98, 0.9, 0.7, 0)
) -> Iterator[Problem]:
    example = f"for example: {typed(key, good)}"
    falling = all(level - after >= LEAST_STEP for level, after in pairwise(sigmas))
    if len(sigmas) < 2 or sigmas[0] > 1 or sigmas[-1] != 0 or not falling:
        yield key, f"{key} {list(sigmas)} do not fall from at most 1 to 0; {example}"
    elif len(sigmas) > MAX_STEPS + 1:
        yield key, f"{key} has {len(sigmas)} noise levels, at most {MAX_STEPS + 1} are; {example}"
    elif steps is not None and steps != len(sigmas) - 1:
        fitting = typed("num_inference_steps", len(sigmas) - 1)
        yield key, f"{key} has {len(sigmas)} noise levels, which is not {steps} steps but {fitting}"


def _wrong_files(spec: RunSpec) -> Iterator[Problem]:
    if "/" in (spec.model_name or ""):
        sentence = f"model_name {spec.model_name} begins file names and cannot hold a `/`"
        yield "model_name", f"{sentence}; name the file: {typed('output', 'FILE')}"
    kind = CLIP_TYPES[spec.running.video]
    if spec.output and Path(spec.output).suffix.lower() != f".{kind}":
        legal, named = f"{'an' if spec.running.video else 'a'} {kind}", _named(Path(spec.output), kind)
        yield "output", f"output {spec.output!r} is not {legal}; name one: {typed('output', named)}"
    if spec.save_latents and not Path(spec.save_latents).name:
        file = typed("save_latents", "clip.safetensors")
        yield "save_latents", f"save_latents {spec.save_latents!r} is a folder; name a file: {file}"
    if spec.initial_noise and not Path(expanduser(spec.initial_noise)).is_file():
        yield "initial_noise", f"there is no noise file {spec.initial_noise}; check the path"
    if spec.audio and not Path(expanduser(spec.audio.path)).exists():
        yield "audio", f"there is no audio {spec.audio.path}; check the path"
    if spec.initial_noise and (videos := spec.num_videos * len(spec.seed or (0,))) > 1:
        nearest = f"{typed('num_videos', 1)} and one {option_name('seed')}"
        yield "initial_noise", f"a noise file starts one video, {videos} are asked for; nearest: {nearest}"


def _named(path: Path, kind: str) -> Path:
    """The nearest legal path of an mp4, or of another kind of file."""
    if path.expanduser().is_dir():
        return path / f"video.{kind}"
    return path.with_name(f"video.{kind}") if path.name.startswith(".") else path.with_suffix(f".{kind}")
