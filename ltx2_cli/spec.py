"""What was asked: `RunSpec` and its parts. Plain frozen values; the numbers live in `configs/*.yaml`."""

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from os.path import expanduser
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

T_co = TypeVar("T_co", covariant=True)
NO_CACHE = "off"  # in place of the folder for compiled programs
MAKE_ROOM = "free some space, or name another place: -o FILE"  # the hint where a file cannot be written


class SpecError(Exception):
    """A request that cannot be met: one sentence, and a hint that says what to do instead; empty where the
    sentence says it. Exit code 2."""

    def __init__(self, sentence: str, hint: str):
        super().__init__(sentence)
        self.hint = hint


class RunError(Exception):
    """A run that failed after a legal request: one sentence and a hint. Exit code 1."""

    def __init__(self, sentence: str, hint: str):
        super().__init__(sentence)
        self.hint = hint


class FitError(Exception):
    """A plan that the devices have no memory for: one sentence, and a hint that says what would fit. Exit code 3."""

    def __init__(self, sentence: str, hint: str):
        super().__init__(sentence)
        self.hint = hint


class FlawError(Exception):
    """A clip that was written and has flaws, where none are accepted: one sentence and a hint. Exit code 4."""

    def __init__(self, sentence: str, hint: str):
        super().__init__(sentence)
        self.hint = hint


class StoppedError(Exception):
    """A run that was asked to stop, and can be gone on with: one sentence and a hint. Exit code 130."""

    def __init__(self, sentence: str, hint: str):
        super().__init__(sentence)
        self.hint = hint


class NotFiniteError(RunError):
    """What a network made holds a NaN or an infinity."""


class AV(NamedTuple, Generic[T_co]):
    """A video thing and its audio twin. A pytree, since it is a named tuple."""

    video: T_co
    audio: T_co


class DType(StrEnum):
    """A floating-point type that a network can run in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class ShiftTokens(StrEnum):
    """Which token count shifts the schedule: always 4096, or the clip's own."""

    reference = "reference"
    actual = "actual"


class StgRule(StrEnum):
    """When spatio-temporal guidance perturbs: whenever asked, or only where the checkpoint's config says
    `perturbed_attn`."""

    always = "always"
    config = "config"


@dataclass(frozen=True)
class Guidance:
    """How far each guidance pass pushes one stream."""

    guidance_scale: float
    stg_scale: float
    modality_scale: float
    guidance_rescale: float


OFF = Guidance(guidance_scale=1.0, stg_scale=0.0, modality_scale=1.0, guidance_rescale=0.0)


@dataclass(frozen=True)
class StreamGuidanceSpec:
    """Guidance of one stream as it is asked for; None: as the checkpoint's recipe has it."""

    guidance_scale: float | None
    stg_scale: float | None
    modality_scale: float | None
    guidance_rescale: float | None


@dataclass(frozen=True)
class GuidanceSpec:
    """Guidance of both streams."""

    video: StreamGuidanceSpec
    audio: StreamGuidanceSpec


class Hold(StrEnum):
    """How the LoRAs of a second stage are held beside the first's weights: added to a second copy of those they change,
    or as their low-rank factors, multiplied by at every step; `auto`: the copy where memory has room for it."""

    auto = "auto"
    copy = "copy"
    low_rank = "low_rank"


@dataclass(frozen=True)
class RefinementSpec:
    """The second stage as it is asked for: the latents are upsampled, noised again and denoised in a few steps without
    guidance. None: as the recipe has it."""

    upsampler: str | None  # a file, a folder or a repository REPO[/FILE]; None also: the one in the checkpoint's folder
    lora: tuple[str, ...] | None  # for this stage, besides those of both
    hold: Hold
    sigmas: tuple[float, ...] | None  # the noise levels; of none, there is no second stage
    keep_audio: bool | None  # the sound is the first stage's
    adain: float  # how far the upsampled latents are moved to the statistics they had, 0 to 1
    tone_map: float  # how far their range is compressed, 0 to 1
    lengthen: (
        bool  # an upsampler of time makes it last twice as long, the sound stretched; else: twice as many a second
    )


class Kernel(StrEnum):
    """How attention is computed: a kernel made for TPUs, one for GPUs, plain XLA; `auto`: the one for the devices."""

    auto = "auto"
    splash = "splash"
    cudnn = "cudnn"
    xla = "xla"


@dataclass(frozen=True)
class ShardingSpec:
    """One hardware profile: a mesh, and rules from logical axes to mesh axes.

    `mesh` gives each axis its size, -1 for what is left; the axis along which the rows lie gets fewer where there are
    fewer rows and the tokens' takes what is left. `weights` and `activations` send a logical axis to a mesh axis; an
    axis not named is whole on every device.
    """

    profile: str
    mesh: dict[str, int]
    weights: dict[str, str]
    activations: dict[str, str]
    attention: Kernel
    tile_rows: int | None  # of 16-bit matrices stacked by layer, as a TPU's memory holds them; None: as it will
    replicate_vae: bool
    use_batched_text_encoder: bool


@dataclass(frozen=True)
class RunSpec:
    """The request, complete: `configs/` and flags merge into it, `resolve` reads it, it is stored with the video."""

    # what to show and to hear
    prompt: str
    negative_prompt: str
    height: int  # pixels, a multiple of 32
    width: int  # pixels, a multiple of 32
    num_frames: int  # 8k + 1
    fps: float
    num_videos: int  # at once; video i of a batch is what seed + i makes alone
    seed: tuple[int, ...] | None  # each begins a batch; None: a random one, said aloud
    # which networks
    model: str
    model_name: str | None  # file names begin with it
    checkpoint: str  # a folder, a single file, a repository REPO[/FILE][@REV], or `embedded`
    text_encoder: str | None  # a folder or a repository with Gemma-3, for a single file
    lora: tuple[str, ...]  # each a file or a repository REPO[/FILE], with an optional :STRENGTH
    recipe: str  # `auto`: the one that the checkpoint was published with
    reference: str
    # how to get there; None: as the checkpoint's recipe has it
    num_inference_steps: int | None
    sigmas: tuple[float, ...] | None  # the noise levels themselves, from at most 1 to 0; None: from the schedule
    guidance: GuidanceSpec
    stg_blocks: tuple[int, ...] | None
    refinement: RefinementSpec
    stg_rule: StgRule
    shift_tokens: ShiftTokens
    clamp_vocoder: bool  # cut the first of two waveforms off at full scale
    max_sequence_length: int  # text tokens
    # in which arithmetic, on which devices
    dtype: DType
    text_encoder_dtype: DType
    compile_text_encoder: bool
    scan_layers: bool
    compile_cache: str | None  # the folder for compiled programs, or `off`; None: the user's own
    vae_memory: float | None  # GB on each device that video decoding may take; None: what the weights leave of it
    keep_resident: bool  # hold every network in memory instead of dropping each after its phase
    sharding: ShardingSpec
    # files
    noise: str | None
    save_latents: str | None
    output: str | None
    base_output_directory: str | None  # None: the current folder

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each video, batch by batch; none while none is chosen."""
        return tuple(first + video for first in self.seed or () for video in range(self.num_videos))


MAX_STEPS = 1000
MAX_VIDEOS = 1000
LEAST_STEP = 1e-6  # between noise levels, which float32 tells apart
MAX_FPS = 240
MAX_SEED = 2**32 - 1
SURROGATE = re.compile("[\ud800-\udfff]")  # how Python keeps a byte that is no UTF-8


def validate(spec: RunSpec) -> None:
    """Raise `SpecError` with everything that is wrong with `spec` by itself, a line each, and what to type instead."""
    findings = [*_wrong_text(spec), *_wrong_content(spec), *_wrong_process(spec), *_wrong_files(spec)]
    if findings:
        raise SpecError("\n".join(findings), "")


def _wrong_text(spec: RunSpec) -> Iterator[str]:
    for key, value in [*vars(spec).items(), *(("lora", lora) for lora in spec.lora)]:
        if isinstance(value, str) and SURROGATE.search(value):
            yield f"{key} {value!r} is not text in UTF-8; type or save it as UTF-8"


def _wrong_content(spec: RunSpec) -> Iterator[str]:
    if not spec.prompt.strip():
        yield 'the prompt is empty; say what to show: --prompt "..."'
    yield from _off_grid("height", spec.height, 32, 0)
    yield from _off_grid("width", spec.width, 32, 0)
    yield from _off_grid("num_frames", spec.num_frames, 8, 1)
    yield from _beyond("fps", spec.fps, 1, MAX_FPS)
    yield from _beyond("num_videos", spec.num_videos, 1, MAX_VIDEOS)
    yield from _wrong_seeds(spec)


def _off_grid(key: str, value: int, step: int, first: int) -> Iterator[str]:
    """A finding if `value` is not a positive `k * step + first`, with the nearest that are."""
    if value > 0 and value % step == first:
        return
    below = (value - first) // step * step + first
    nearest = [str(legal) for legal in (below, below + step) if legal > 0] or [str(first or step)]
    rule = f"8k + {first}" if first else f"a multiple of {step}"
    yield f"{key} {value} is not {rule}; nearest: --{key.replace('_', '-')} {' or '.join(nearest)}"


def _beyond(key: str, value: float, lowest: int, highest: int) -> Iterator[str]:
    """A finding if `value` is not between the two, with the nearest that is; of no number, the lowest."""
    if not lowest <= value <= highest:
        nearest = highest if value > highest else lowest
        yield f"{key} {value} is not in {lowest} to {highest}; nearest: --{key.replace('_', '-')} {nearest}"


def _wrong_seeds(spec: RunSpec) -> Iterator[str]:
    for seed in spec.seed or ():
        if not 0 <= seed <= MAX_SEED - max(spec.num_videos - 1, 0):
            yield f"seed {seed} is out of range, video i counts as seed + i; legal: --seed 0 to {MAX_SEED}"
    if spec.seed == ():
        yield "seed is a list of none; for example: --seed 7, or --seed 0..3"
    elif len(spec.seed or ()) * max(spec.num_videos, 0) > MAX_VIDEOS:
        yield f"{len(spec.seed or ())} seeds of {spec.num_videos} videos each are more than {MAX_VIDEOS} clips"
    elif len(set(spec.seeds)) < len(spec.seeds):
        twice = next(seed for place, seed in enumerate(spec.seeds) if seed in spec.seeds[:place])
        apart = "; video i counts as seed + i" * (spec.num_videos > 1)
        yield f"seed {twice} is there twice{apart}; for example: --seed 0..3 --num-videos 1"


def _wrong_process(spec: RunSpec) -> Iterator[str]:
    if spec.num_inference_steps is not None:
        yield from _beyond("num_inference_steps", spec.num_inference_steps, 1, MAX_STEPS)
    if spec.sigmas is not None:
        yield from _wrong_sigmas(spec.sigmas, spec.num_inference_steps)
    yield from _wrong_refinement(spec.refinement)
    for stream, prefix in (("video", "--"), ("audio", "--audio-")):
        for name, scale in asdict(spec.guidance)[stream].items():
            if scale is not None and not math.isfinite(scale):
                flag = prefix + name.replace("_", "-")
                yield f"guidance.{stream}.{name} {scale} is not a finite number; for example: {flag} 1"
    if min(spec.stg_blocks or (0,)) < 0:
        yield f"stg_blocks {list(spec.stg_blocks or ())} has a negative block; blocks count from 0: --stg-blocks 29"
    if spec.vae_memory is not None and not spec.vae_memory > 0:
        yield f"vae_memory {spec.vae_memory:g} is no number of GB; for example: --set vae_memory=8"
    if (rows := spec.sharding.tile_rows) is not None and rows < 1:
        yield f"sharding.tile_rows {rows} is no number of rows; --set sharding.tile_rows=null leaves it to the device"
    if spec.max_sequence_length < 1:
        yield f"max_sequence_length {spec.max_sequence_length} leaves no text; usual: --set max_sequence_length=1024"


def _wrong_refinement(refinement: RefinementSpec) -> Iterator[str]:
    if refinement.sigmas:
        yield from _wrong_sigmas(refinement.sigmas, None, "refinement.sigmas", "[0.9, 0.7, 0.4, 0]")
    for name in ("adain", "tone_map"):
        if not 0 <= (share := vars(refinement)[name]) <= 1:
            yield f"refinement.{name} {share:g} is not in 0 to 1; nearest: --set refinement.{name}={int(share > 1)}"


def _wrong_sigmas(
    sigmas: tuple[float, ...], steps: int | None, key: str = "sigmas", good: str = "[1, 0.98, 0.9, 0.7, 0]"
) -> Iterator[str]:
    example = f"for example: --set '{key}={good}'"
    falling = all(level - after >= LEAST_STEP for level, after in pairwise(sigmas))
    if len(sigmas) < 2 or sigmas[0] > 1 or sigmas[-1] != 0 or not falling:
        yield f"{key} {list(sigmas)} do not fall from at most 1 to 0; {example}"
    elif len(sigmas) > MAX_STEPS + 1:
        yield f"{key} has {len(sigmas)} noise levels, at most {MAX_STEPS + 1} are; {example}"
    elif steps is not None and steps != len(sigmas) - 1:
        yield f"{key} has {len(sigmas)} noise levels, which is not {steps} steps but --steps {len(sigmas) - 1}"


def _wrong_files(spec: RunSpec) -> Iterator[str]:
    if "/" in (spec.model_name or ""):
        yield f"model_name {spec.model_name} begins file names and cannot hold a `/`; use -o to name the file"
    if spec.output is not None and Path(spec.output).suffix.lower() != ".mp4":
        yield f"output {spec.output!r} is not an mp4; name one: -o {Path(spec.output).stem or 'video'}.mp4"
    if spec.noise is not None and not Path(expanduser(spec.noise)).is_file():
        yield f"there is no noise file {spec.noise}; check the path after --noise"
    if spec.noise is not None and (videos := spec.num_videos * len(spec.seed or (0,))) > 1:
        yield f"a noise file starts one video, {videos} are asked for; nearest: --num-videos 1 and one --seed"
