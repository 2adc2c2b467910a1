"""What a request means here: `resolve(RunSpec) -> Plan`, the only place that decides. It reads no weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax

from ltx2_cli.diffusion.guidance import Pass
from ltx2_cli.diffusion.latents import Shape, read_noise
from ltx2_cli.errors import UsageError
from ltx2_cli.models.arch import Arch
from ltx2_cli.models.layouts import open_folder, open_single_file, read_text_encoder
from ltx2_cli.models.lora import find_adapters, unmet_wishes
from ltx2_cli.models.networks import Checkpoint, Networks
from ltx2_cli.models.upsampler import LatentUpsamplerArch, has_upsampler, open_upsampler
from ltx2_cli.nn.kernels import choose_backend
from ltx2_cli.plan.checks import (
    check_hosts,
    check_size,
    decode_warnings,
    device_profile,
    gather_warnings,
    untrained_warnings,
)
from ltx2_cli.plan.decoding import DecodePlan, free_bytes, plan_tiling
from ltx2_cli.plan.recipe import (
    ONE_STAGE,
    TWO_STAGE,
    apply_recipe,
    guess_second_stage,
    recipe_warnings,
    unused_option_warnings,
)
from ltx2_cli.plan.stages import (
    DENOISER,
    REFINER,
    InitialLatents,
    LoraDeltas,
    Loras,
    Phase,
    SecondStage,
    Stage,
    add_second_stage,
    build_stages,
    phases,
    recipe_passes,
    upsampled_spec,
)
from ltx2_cli.request.profiles import AUTO, read_sharding
from ltx2_cli.request.spec import DType, RunSpec, Streams
from ltx2_cli.request.validation import random_seed
from ltx2_cli.sharding import ShardingPlan, lay_out
from ltx2_cli.weights.checkpoint import TensorFiles, collect, raise_all
from ltx2_cli.weights.declare import weights
from ltx2_cli.weights.hub import Download, as_path, list_downloads, locate
from ltx2_cli.weights.lora import LoraFile, open_lora
from ltx2_cli.weights.lora_source import lora_downloads, lora_file, parse_lora
from ltx2_cli.weights.published import FOLDER_FILES, TEXT_ENCODER_FILES, UPSAMPLER_FILES

DECODERS = ("vae", "audio_vae", "vocoder")


@dataclass(frozen=True)
class Declared:
    """The networks that a request uses, without their weights: the same on all devices."""

    checkpoint: Checkpoint
    networks: Networks
    added: LoraDeltas  # by the LoRAs
    warnings: tuple[str, ...]  # about the LoRAs
    second_stage: SecondStage | None


class TextPlan(NamedTuple):
    """How prompts are read."""

    tokens: int  # of each prompt, at most
    at_once: int  # prompts in a batch
    dtype: DType  # of the text encoder
    compiled: bool


@dataclass(frozen=True)
class Plan:
    """Everything a run needs to know before it reads a weight."""

    spec: RunSpec  # with the seed, the recipe and its values, and the sharding profile that were chosen
    checkpoint: Checkpoint
    networks: Networks  # without their weights
    added: LoraDeltas  # by the LoRAs
    sharding: ShardingPlan  # of all but the denoisers
    prompts: tuple[str, ...]  # distinct, in the order of the passes that read them
    stages: tuple[Stage, ...]
    decoding: DecodePlan
    warnings: tuple[str, ...]  # what is legal and hardly meant, a sentence each

    def contexts(self, passes: tuple[Pass, ...]) -> tuple[int, ...]:
        """Which of the prompts each pass reads."""
        negative = self.prompts.index(self.spec.negative_prompt) if Pass.UNCOND in passes else 0
        return tuple(negative if each is Pass.UNCOND else 0 for each in passes)

    def network(self, name: str) -> Any:
        """The network `name` without its weights; `REFINER` is the denoiser with other numbers."""
        return self.networks.present()[DENOISER if name == REFINER else name]

    @property
    def arch(self) -> Arch:
        """What the networks are."""
        return self.checkpoint.arch

    @property
    def latent_shapes(self) -> Streams[Shape]:
        """Those of one video in a file, when the last stage is done."""
        return self.stages[-1].shapes

    @property
    def dtype(self) -> DType:
        """That of all networks but the text encoder."""
        return self.spec.dtype

    @property
    def text(self) -> TextPlan:
        """How prompts are read."""
        spec, prompts = self.spec, len(self.prompts)
        at_once = prompts if spec.sharding.use_batched_text_encoder else 1
        return TextPlan(spec.max_sequence_length, at_once, spec.text_encoder_dtype, spec.compile_text_encoder)

    @property
    def replicated(self) -> tuple[str, ...]:
        """The networks whose weights lie whole on every device."""
        return DECODERS if self.spec.sharding.replicate_vae else ()

    @property
    def keep_resident(self) -> bool:
        """Whether networks stay in memory after their phase."""
        return self.spec.keep_resident

    @property
    def seeds(self) -> tuple[int, ...]:
        """That of each video."""
        return self.spec.seeds

    @property
    def batch_size(self) -> int:
        """How many videos are made at once."""
        return self.spec.num_videos

    @property
    def batches(self) -> tuple[tuple[int, ...], ...]:
        """The seeds of the videos that are made at once."""
        size = self.batch_size
        return tuple(self.seeds[first : first + size] for first in range(0, len(self.seeds), size))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What a run goes through, in order, between text and decoding."""
        return phases(self.stages)


def decodes_beside(plan: Plan) -> bool:
    """Whether the decoders and their work fit beside the denoisers, so that no clip waits for the last seed. A step
    computes in the room that decoding takes after it."""
    room = free_bytes(plan.spec, plan.networks, plan.sharding, (DENOISER, *DECODERS))
    return len(plan.batches) > 1 and room >= plan.decoding.bytes


def missing_downloads(spec: RunSpec) -> list[Download]:
    """The files that `resolve` would download first; none for what is a path here or in the cache.

    Raises `UsageError` where some of it can be had neither from the cache nor from the hub.
    """
    checkpoint = [(spec.checkpoint, FOLDER_FILES)]
    text_encoder = [] if spec.text_encoder is None else [(spec.text_encoder, TEXT_ENCODER_FILES)]
    second = guess_second_stage(spec)
    refines = second.sigmas != ()  # None: at levels that the page of the model says, which is not open yet
    own = spec.second_stage.upsampler is None and has_upsampler(as_path(spec.checkpoint))
    upsampler = [(second.upsampler, UPSAMPLER_FILES)] if refines and second.upsampler and not own else []
    adding = [*spec.lora, *(second.lora or () if refines else ())]
    loras, lost = collect({lora: partial(lora_downloads, parse_lora(lora)[0]) for lora in adding})
    needed = [list_downloads(name, wanted) for name, wanted in (*checkpoint, *text_encoder, *upsampler)]
    absent = [file for files in (*loras.values(), *needed) for file in files if not file.cached]
    if absent:
        raise_all(lost)
    return absent  # where nothing is to be fetched first, `resolve` says what is wrong with LoRAs and all else at once


def resolve(spec: RunSpec, source: InitialLatents | None = None) -> Plan:
    """Find the checkpoint, check it against what its configs declare, and decide all that the request left open.

    With latents `source` to go on from, there is the second stage alone, and the size is what it makes of
    them. Raises `UsageError` for a request or a checkpoint that cannot be met, with every finding of its kind.
    """
    checkpoint, loras = _open(spec)
    own = spec.second_stage.upsampler is None and has_upsampler(checkpoint.where)
    spec = apply_recipe(spec, checkpoint.arch, TWO_STAGE if source else ONE_STAGE)
    if own:
        spec = replace(spec, second_stage=replace(spec.second_stage, upsampler=None))
    second_stage = _open_second_stage(spec, checkpoint) if spec.second_stage.sigmas or source else None
    plan = build_plan(declare(spec, checkpoint, loras, second_stage), spec, jax.devices(), source)
    if jax.process_count() > 1:
        check_hosts(spec, plan.sharding)
    if spec.initial_noise is not None and source is None:
        read_noise(spec.initial_noise, plan.stages[0].shapes)
    return plan


def stage1_plan(plan: Plan) -> Plan:
    """The plan up to where a second stage goes on. Raises `UsageError` where there is none."""
    if len(plan.stages) == 1:
        raise UsageError(f"the recipe {plan.spec.recipe} has one stage", "--recipe two_stage, or no --stop-after")
    stage = plan.stages[0]
    room = _decode_budget(plan.spec, plan.networks, plan.sharding)
    return replace(plan, stages=(stage,), decoding=_plan_decoding(plan.spec, plan.networks, stage, plan.sharding, room))


def declare(spec: RunSpec, checkpoint: Checkpoint, loras: Loras, second_stage: SecondStage | None = None) -> Declared:
    """The networks of a request for this checkpoint, with these LoRAs at their strengths.

    Raises `UsageError` for LoRAs that do not fit them.
    """
    networks = checkpoint.networks(spec)
    added: LoraDeltas = find_adapters(loras, networks)
    if second_stage:
        networks, checkpoint, added = add_second_stage(networks, checkpoint, added, second_stage, spec.dtype)
    warnings = tuple(warning for lora, _ in loras for warning in unmet_wishes(lora))
    return Declared(checkpoint, networks, added, warnings, second_stage)


def build_plan(
    declared: Declared, spec: RunSpec, devices: Sequence[jax.Device], source: InitialLatents | None = None
) -> Plan:
    """What the request means for these networks on these devices. Raises `UsageError` where that cannot be met."""
    checkpoint, networks, second_stage = declared.checkpoint, declared.networks, declared.second_stage
    arch, added = checkpoint.arch, declared.added
    if second_stage and source:
        spec = upsampled_spec(spec, arch, second_stage, source)
    if spec.max_sequence_length > (most := checkpoint.text_encoder.max_position_embeddings):
        raise UsageError(
            f"max_sequence_length {spec.max_sequence_length} is more than the text encoder's {most} tokens",
            f"--set max_sequence_length={most}",
        )
    spec = _fill_defaults(spec, arch, devices)
    declared_weights = [weight for module in networks.present().values() for weight in weights(module)]
    heads = {stream.name: stream.heads for stream in arch.transformer.streams}
    kernel, slow = choose_backend(spec.sharding.attention, devices[0], spec.dtype, arch.head_sizes)
    lay = partial(lay_out, replace(spec.sharding, attention=kernel), devices, declared_weights, heads=heads)
    # also for a second stage alone: encoded and laid out as after the first, the text is the same to the bit
    passes = recipe_passes(spec, arch)
    sharding, guided = lay(len(passes) * spec.num_videos), Pass.UNCOND in passes
    all_stages = build_stages(spec, arch, added, second_stage, source, lay)
    room = _decode_budget(spec, networks, sharding)
    decoding = _plan_decoding(spec, networks, all_stages[-1], sharding, room)
    prompts = tuple(dict.fromkeys([spec.prompt, *[spec.negative_prompt] * guided]))
    warnings = (
        *recipe_warnings(spec, arch),
        *unused_option_warnings(spec, arch, second_stage.upsampler.upsampling.time if second_stage else None),
        *((slow,) if slow else ()),
        *gather_warnings(sharding, arch.transformer.num_attention_heads),
        *declared.warnings,
        *decode_warnings(decoding, room),
        *untrained_warnings(spec, checkpoint, all_stages, prompts),
    )
    return Plan(spec, checkpoint, networks, added, sharding, prompts, all_stages, decoding, warnings)


def _open(spec: RunSpec) -> tuple[Checkpoint, list[tuple[LoraFile, float]]]:
    """The headers of the checkpoint and of the LoRAs, each with its strength; all that is wrong is said at once."""
    loras, unread = collect({str(i): partial(_open_lora, lora) for i, lora in enumerate(spec.lora)})
    opened, misread = collect({spec.checkpoint: partial(_open_checkpoint, spec)})
    raise_all([*misread, *unread])
    return opened[spec.checkpoint], list(loras.values())


def _open_second_stage(spec: RunSpec, checkpoint: Checkpoint) -> SecondStage:
    """The headers of what the second stage takes; all that is wrong with them is said at once."""
    loras = spec.second_stage.lora or ()
    opened, misread = collect({"upsampler": partial(_open_upsampler, spec.second_stage.upsampler, checkpoint)})
    adding, unread = collect({str(i): partial(_open_lora, lora) for i, lora in enumerate(loras)})
    raise_all([*misread, *unread])
    return SecondStage(*opened["upsampler"], [each for each in adding.values() if each[1]])


def _open_upsampler(name: str | None, checkpoint: Checkpoint) -> tuple[LatentUpsamplerArch, TensorFiles]:
    """That of a name, or of none that in the checkpoint's folder."""
    return open_upsampler(locate(name, UPSAMPLER_FILES) if name else checkpoint.where, checkpoint.arch.video_vae)


def _open_lora(text: str) -> tuple[LoraFile, float]:
    name, strength = parse_lora(text)
    return open_lora(lora_file(name)), strength


def _open_checkpoint(spec: RunSpec) -> Checkpoint:
    place = locate(spec.checkpoint, FOLDER_FILES)
    if place.is_dir() and spec.text_encoder is None:
        return open_folder(place)
    if place.is_dir():
        raise UsageError(
            f"{spec.checkpoint} has a text encoder of its own",
            "--text-encoder is for single files: leave it out, or take back a record's by --set text_encoder=null",
        )
    if spec.text_encoder is None:
        raise UsageError(f"{spec.checkpoint} has no text encoder", "--text-encoder FOLDER or REPO names Gemma-3")
    return open_single_file(place, read_text_encoder(locate(spec.text_encoder, TEXT_ENCODER_FILES)))


def _fill_defaults(spec: RunSpec, arch: Arch, devices: Sequence[jax.Device]) -> RunSpec:
    """The request with what it left open filled in; raises `UsageError` for what the model cannot do."""
    check_size(spec, arch)
    layers = arch.transformer.num_layers
    beyond = [block for block in spec.stg_blocks or () if block >= layers]
    if beyond and (spec.guidance.video.stg_scale or spec.guidance.audio.stg_scale):
        raise UsageError(
            f"STG block {beyond[0]} does not exist: the model has blocks 0 to {layers - 1}",
            f"--stg-blocks {layers - 1}, or --stg-scale 0 --audio-stg-scale 0 to do without",
        )
    seed = spec.seed if spec.seed is not None else (random_seed(spec),)
    auto = spec.sharding.profile == AUTO
    sharding = read_sharding(device_profile(devices), spec.sharding) if auto else spec.sharding
    return replace(spec, seed=seed, sharding=sharding)


def _decode_budget(spec: RunSpec, networks: Networks, sharding: ShardingPlan) -> float:
    """Bytes on each device that decoding may take."""
    if spec.vae_memory_gb is not None:
        return spec.vae_memory_gb * 1e9
    return free_bytes(spec, networks, sharding, DECODERS)


def _plan_decoding(spec: RunSpec, networks: Networks, last: Stage, sharding: ShardingPlan, room: float) -> DecodePlan:
    """How what the last stage makes is decoded."""
    clip = last.geometry
    size = clip.frames, clip.height, clip.width
    return plan_tiling(networks.vae.decoder, spec.num_videos, size, sharding.mesh.devices.ravel(), room)
