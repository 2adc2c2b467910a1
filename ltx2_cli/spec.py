"""What was asked: `RunSpec` and its parts. Plain frozen values; the numbers live in `configs/*.yaml`."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class SpecError(Exception):
    """A request that cannot be met: one sentence, and a hint that says what to do instead. Exit code 2."""

    def __init__(self, sentence: str, hint: str = ""):
        super().__init__(sentence)
        self.hint = hint


class RunError(Exception):
    """A run that failed after a legal request: one sentence and a hint. Exit code 1."""

    def __init__(self, sentence: str, hint: str = ""):
        super().__init__(sentence)
        self.hint = hint


class AV(NamedTuple, Generic[T]):
    """A video thing and its audio twin. A pytree, since it is a named tuple."""

    video: T
    audio: T


class DType(StrEnum):
    """A floating-point type that a network can run in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class ShiftTokens(StrEnum):
    """Which token count shifts the schedule: always 4096, or the clip's own (model_spec §6.2, §12 row 1)."""

    reference = "reference"
    actual = "actual"


class StgRule(StrEnum):
    """When spatio-temporal guidance perturbs: whenever asked, or only where the checkpoint's config says
    `perturbed_attn` (model_spec §12 row 12)."""

    always = "always"
    config = "config"


@dataclass(frozen=True)
class Guidance:
    """How far each guidance pass pushes one stream (model_spec §7). Off: 1, 0, 1, 0."""

    guidance_scale: float
    stg_scale: float
    modality_scale: float
    guidance_rescale: float


@dataclass(frozen=True)
class GuidanceSpec:
    """Guidance of both streams."""

    video: Guidance
    audio: Guidance


@dataclass(frozen=True)
class ShardingSpec:
    """One hardware profile: a mesh, and rules from logical axes to mesh axes.

    `mesh` gives each axis its size, -1 for what is left. `weights` and `activations` send a logical axis to a mesh
    axis; an axis not named is whole on every device.
    """

    profile: str
    mesh: dict[str, int]
    weights: dict[str, str]
    activations: dict[str, str]
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
    num_videos: int  # video i of a batch is what seed + i makes alone
    seed: int | None  # None: a random one, said aloud
    # which networks
    model: str
    model_name: str | None  # file names begin with it
    checkpoint: str  # a folder, a repository id with an optional @revision, or `embedded`
    recipe: str
    reference: str
    # how to get there
    num_inference_steps: int
    guidance: GuidanceSpec
    stg_blocks: list[int] | None  # None: the block at the published depth of 29 in 48
    stg_rule: StgRule
    shift_tokens: ShiftTokens
    max_sequence_length: int  # text tokens
    # in which arithmetic, on which devices
    dtype: DType
    text_encoder_dtype: DType
    compile_text_encoder: bool
    scan_layers: bool
    keep_resident: bool  # hold every network in memory instead of dropping each after its phase
    sharding: ShardingSpec
    # files
    noise: str | None
    save_latents: str | None
    output: str | None
    base_output_directory: str
