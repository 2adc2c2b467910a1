"""The request: `RunSpec` and its parts, frozen values. The defaults are in `configs/*.yaml`."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Literal, NamedTuple, TypeVar

T_co = TypeVar("T_co", covariant=True)
NO_CACHE = "off"  # value of `compile_cache` that turns the cache off


class Streams(NamedTuple, Generic[T_co]):
    """A pair for the video and the audio stream. A named tuple is a pytree."""

    video: T_co
    audio: T_co


BOTH = Streams(True, True)


class DType(StrEnum):
    """A floating-point type that a network can run in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return 4 if self is DType.float32 else 2


class WeightType(StrEnum):
    """A type in which matrices are held; `auto`: few bits as in the files, else the data type of their network."""

    auto = "auto"
    bfloat16 = "bfloat16"
    int8 = "int8"
    fp8 = "fp8"
    int4 = "int4"


EIGHT_BITS = WeightType.int8, WeightType.fp8


class ComputeType(StrEnum):
    """How the denoiser multiplies with quantised matrices: in its data type, or in eight bits (`full`); `auto`:
    full where the devices' published rate is above that of bfloat16."""

    auto = "auto"
    weights = "weights"
    full = "full"


class Decoder(StrEnum):
    """What turns video latents into frames: the decoder of the video autoencoder, or the diffusion decoder, which
    LTX-2.5 alone has."""

    convolution = "convolution"
    diffusion = "diffusion"


class Offload(StrEnum):
    """Weights that stay in the host's memory: none, or of the matrices in the layers of text encoder, connectors and
    denoiser those of feed-forwards, or all. In the order of the devices' memory that they take, the most first."""

    none = "none"
    feed_forward = "feed_forward"
    layers = "layers"

    @property
    def text(self) -> str:
        """The matrices, in words."""
        return {Offload.none: "nothing", Offload.feed_forward: "feed-forwards", Offload.layers: "layers"}[self]


@dataclass(frozen=True)
class Guidance:
    """Guidance scales of one stream."""

    guidance_scale: float
    stg_scale: float
    modality_scale: float
    guidance_rescale: float


NO_GUIDANCE = Guidance(guidance_scale=1.0, stg_scale=0.0, modality_scale=1.0, guidance_rescale=0.0)


@dataclass(frozen=True)
class StreamGuidanceSpec:
    """Requested guidance of one stream; None: the recipe's value."""

    guidance_scale: float | None
    stg_scale: float | None
    modality_scale: float | None
    guidance_rescale: float | None


@dataclass(frozen=True)
class GuidanceSpec:
    """Requested guidance of both streams."""

    video: StreamGuidanceSpec
    audio: StreamGuidanceSpec


@dataclass(frozen=True)
class SecondStageSpec:
    """Requested second stage: latents are upsampled, noised again and denoised in a few steps without guidance.
    None: the recipe's value."""

    upsampler: str | None  # file, folder or REPO[/FILE]; None also: the one in the checkpoint's folder
    lora: tuple[str, ...] | None  # added to `lora` for this stage
    sigmas: tuple[float, ...] | None  # noise levels; empty: no second stage
    sampler: str | None  # None also: Euler steps
    keep_audio: bool | None  # take the audio of the first stage
    freeze_audio: bool | None  # the audio of the first stage is not noised: the video hears it as it is, and it is kept
    follow_first: bool | None  # the first stage's video is a reference, for an in-context LoRA of this stage
    keyframe_windows: int | None  # windows of whole segments between keyframes, with new ones in the middle of each
    spatial_tiles: int | None  # along height and along width, whose velocities are blended; keyframes are given
    temporal_tiles: int | None  # along time, which end at keyframes
    temporal_upsample: Literal["fps", "duration"]  # what a temporal upsampler doubles; duration stretches the audio

    @property
    def in_tiles(self) -> bool:
        """Whether the clip is refined in several tiles."""
        return max(self.spatial_tiles or 1, self.temporal_tiles or 1) > 1


class AttentionBackend(StrEnum):
    """Attention implementation: `fused` and `splash` for TPUs, `cudnn` for NVIDIA GPUs, `blockwise` for CPUs, `xla`
    everywhere; `auto`: the one for the devices."""

    auto = "auto"
    fused = "fused"
    splash = "splash"
    cudnn = "cudnn"
    blockwise = "blockwise"
    xla = "xla"


@dataclass(frozen=True)
class ShardingSpec:
    """One hardware profile: a mesh, and rules from logical axes to mesh axes.

    `mesh` maps each mesh axis to its size, -1 for the remaining devices; with fewer rows than the row axis has devices,
    the token axis takes the rest. `weights` and `activations` map a logical axis to a mesh axis; an axis without a rule
    is replicated.
    """

    profile: str
    mesh: dict[str, int]
    weights: dict[str, str]
    activations: dict[str, str]
    attention: AttentionBackend
    bf16_tile_sublanes: int | None  # tile height of stacked 16-bit weights in TPU memory; None: the chip's
    input_major: bool | None  # whether stacked 16-bit matrices lie (in, out) in TPU memory; None: as the chip's do
    replicate_vae: bool
    use_batched_text_encoder: bool


@dataclass(frozen=True)
class ConditionSpec:
    """An image or part of a video that a clip shows, or follows as the reference of an in-context LoRA; the mask of a
    reference; or an edited clip, with a regenerated part inside it or behind its end."""

    path: str
    frame: int = 0  # of the clip, where it begins; negative: where it ends, counted from the end of the clip
    strength: float | None = None  # 0 to 1: how much of it stays; None: `image_strength` of an image, else 1
    kind: Literal["image", "video", "reference", "mask", "clip"] = "image"
    num_frames: int | None = None  # of a video, 8k + 1; None: as many as there are, up to half of the clip
    downscale: int | None = None  # of a reference, in height and width; None: as its LoRA says
    temporal_scale: int | None = None  # of a reference, in frames a second; None: as its LoRA says
    regenerate: tuple[int, int] = (0, 0)  # of a clip: the first regenerated frame, and the first one behind them
    streams: Literal["both", "video", "audio"] = "both"  # of a clip: what is regenerated
    noise_level: float = 1.0  # of a clip: at which the regenerated part begins; below 1 it keeps some of the clip
    sha256: str | None = None  # of the file; None: whatever it holds


@dataclass(frozen=True)
class SegmentSpec:
    """A later part of a clip with a prompt of its own, up to the next one or the end."""

    start: float  # seconds
    prompt: str


@dataclass(frozen=True)
class AudioSpec:
    """Input audio of a clip."""

    path: str
    sha256: str | None = None  # of the file; None: whatever it holds


@dataclass(frozen=True)
class RunSpec:
    """The request: merged from `configs/`, files and flags, read by `resolve`, stored with the video."""

    # input images, videos and audio
    prompt: str
    negative_prompt: str
    height: int  # pixels, a multiple of 32, in two stages of 64
    width: int  # pixels, a multiple of 32, in two stages of 64
    num_frames: int  # 8k + 1
    fps: float
    segments: tuple[SegmentSpec, ...]  # in the order of their starts; up to the first, `prompt` counts
    windows: int  # that the clip is denoised in, one after the other
    window_overlap: float  # seconds of video that each holds of the one before, at least
    segment_fade: float  # seconds around the start of a segment in which one prompt takes over from the other
    conditions: tuple[ConditionSpec, ...]
    audio: AudioSpec | None  # its audio, which the video follows; None: both are made
    streams: Literal["both", "video", "audio"]  # the generated streams; the other is not run
    loudness: float | None  # LUFS of the audio; None: as it is decoded
    image_crf: int | None  # constant rate factor of H.264 that images go through; 0: none; None: the model's
    image_strength: float | None  # 0 to 1: of images without one, in the stage that starts from noise; None: model's
    reference_strength: float  # 0 to 1: how much the clip and its references attend to each other
    keyframes: int  # single frames that are generated beside the clip and left out of it; of LTX-2.5
    keyframe_segments: tuple[int, ...] | None  # lengths in frames; a keyframe ends each segment of one that divides it
    num_videos: int  # per batch; video i is the one that seed + i makes alone
    seed: tuple[int, ...] | None  # one batch each; None: a random one
    # which networks
    model: str
    model_name: str | None  # begins default file names
    checkpoint: str  # a folder, a single file, a repository REPO[/FILE][@REV], or `embedded`
    text_encoder: str | None  # a folder or a repository with Gemma-3, for a single file
    transformer: str | None  # a .safetensors or .gguf file or REPO/FILE with the denoiser; None: the checkpoint's
    lora: tuple[str, ...]  # each a file or a repository REPO[/FILE], with an optional :STRENGTH
    recipe: str  # `auto`: the one the checkpoint was published with
    compat: str  # `ltx-core` or `diffusers`: the implementation to follow where they differ
    # how to denoise; None: the recipe's value
    num_inference_steps: int | None
    sigmas: tuple[float, ...] | None  # noise levels from at most 1 down to 0; None: from the schedule
    schedule_tokens: int | None  # of video, for which the schedule shifts its noise levels; None: the first stage's own
    sampler: str | None  # of the first stage
    eta: float  # 0 to 1: its fraction of fresh noise, where it draws some
    guidance: GuidanceSpec
    stg_blocks: tuple[int, ...] | None
    guidance_interval: tuple[float, float]  # noise levels: steps that begin at one between them are guided
    stg_every: int  # STG in every n-th of the guided steps, from the first
    modality_every: int  # likewise the guidance away from the stream without its twin
    first_block_cache: float | None  # relative change of the first block, up to which a step skips others; None: never
    nag_scale: float | None  # of attention to the text, away from the negative prompt, without a pass; None: none
    nag_tau: float  # at most so many times a token's L1 norm
    nag_alpha: float  # 0 to 1: the fraction of the guided result
    second_stage: SecondStageSpec
    max_sequence_length: int  # text tokens
    # in which arithmetic, on which devices
    dtype: DType
    weights: WeightType  # of the matrices in the layers of denoiser, connectors and text encoder
    compute: ComputeType
    offload: Offload
    text_encoder_dtype: DType
    text_encoder_copy: bool  # keep a float32 one in bfloat16 in the user's cache
    compile_text_encoder: bool
    scan_layers: bool
    compile_cache: str | None  # folder of compiled programs, or `off`; None: in the user's cache
    decoder: Decoder  # of the video
    vae_memory_gb: float | None  # GB per device for video decoding; None: all that the weights leave
    keep_resident: bool  # keep every network in memory instead of dropping it after its phase
    sharding: ShardingSpec
    # files
    initial_noise: str | None
    save_latents: str | None
    output: str | None
    base_output_directory: str | None  # None: the current folder
    # the dotted keys that files and flags set; no config key itself
    asked: tuple[str, ...] = field(default=(), compare=False)

    @property
    def running(self) -> Streams[bool]:
        """Whether each stream is part of the run."""
        return Streams(self.streams != "audio", self.streams != "video")

    @property
    def follows_diffusers(self) -> bool:
        """Whether diffusers' choices hold where it differs from ltx-core; `configs/compat/diffusers.yaml` lists
        them."""
        return self.compat == "diffusers"

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each video, batch by batch; empty while no seed is chosen."""
        return tuple(first + video for first in self.seed or () for video in range(self.num_videos))
