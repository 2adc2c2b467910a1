"""What was asked: `RunSpec` and its parts. Plain frozen values; the numbers live in `configs/*.yaml`."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

T_co = TypeVar("T_co", covariant=True)
NO_CACHE = "off"  # in place of the folder for compiled programs
MAKE_ROOM = "free some space, or name another place: -o FILE"  # the hint where a file cannot be written


class CommandError(Exception):
    """What ends a command: a sentence, or several, a line each, and a hint that says what to do instead; the hint is
    empty where the sentence says it.

    Line breaks within a sentence, as text of a file has them, are escaped: no file writes lines of its own.
    """

    def __init__(self, sentences: str | Sequence[str], hint: str | Sequence[str]):
        super().__init__(_lines(sentences))
        self.hint = _lines(hint)


def _lines(sentences: str | Sequence[str]) -> str:
    several = [sentences] if isinstance(sentences, str) else sentences
    return "\n".join(sentence.replace("\n", "\\n") for sentence in several)


class SpecError(CommandError):
    """A request that cannot be met. Exit code 2."""


class RunError(CommandError):
    """A run that failed after a legal request. Exit code 1."""


class FitError(CommandError):
    """A plan that the devices have no memory for; the hint says what would fit. Exit code 3."""


class FlawError(CommandError):
    """A clip that was written and has flaws, where none are accepted. Exit code 4."""


class StoppedError(CommandError):
    """A run that all hosts stopped after the same step, and that can be gone on with. Exit code 130."""


class AbortedError(CommandError):
    """A run that was ended at once, of which an earlier state was kept. Exit code 130."""


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
    """How attention is computed: `splash` is made for TPUs, `cudnn` for NVIDIA's GPUs, `blockwise` for CPUs, `xla` is
    the plain definition; `auto`: the one for the devices."""

    auto = "auto"
    splash = "splash"
    cudnn = "cudnn"
    blockwise = "blockwise"
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
