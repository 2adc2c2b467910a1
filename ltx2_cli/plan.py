"""What a request means here: `resolve(RunSpec) -> Plan`, the only place that decides. It reads no weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax

from ltx2_cli.decoding import Decoding, divide
from ltx2_cli.diffusion.guidance import Pass
from ltx2_cli.diffusion.latents import Shape, read_noise
from ltx2_cli.models.arch import Arch
from ltx2_cli.models.folder import open_folder, read_text_encoder
from ltx2_cli.models.lora import find_adapters, unmet_wishes
from ltx2_cli.models.networks import Checkpoint, Networks
from ltx2_cli.models.original.names import RENAMINGS
from ltx2_cli.models.single_file import open_single_file
from ltx2_cli.models.trained_on import clip_warnings, prompt_warnings, read_trained_on
from ltx2_cli.models.upsampler import LatentUpsamplerArch
from ltx2_cli.models.upsampler_source import has_upsampler, open_upsampler
from ltx2_cli.nn.kernels import choose_kernel
from ltx2_cli.profiles import AUTO, profile_names, read_sharding
from ltx2_cli.recipe import ONE_STAGE, TWO_STAGE, complete, contradictions, expected_refinement, ignored
from ltx2_cli.refiner import hold_refiner, left
from ltx2_cli.sharding import ShardingPlan, lay_out
from ltx2_cli.spec import AV, RunSpec, SpecError
from ltx2_cli.stages import (
    DENOISER,
    REFINER,
    Added,
    Loras,
    Refinement,
    Source,
    Stage,
    enlarged,
    recipe_passes,
    stages,
    with_refiner,
)
from ltx2_cli.units import natural
from ltx2_cli.validation import random_seed
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.declare import weights
from ltx2_cli.weights.findings import attempt, refuse
from ltx2_cli.weights.hub import Download, downloads, locate, path_of
from ltx2_cli.weights.lora import LoraFile, open_lora
from ltx2_cli.weights.lora_source import lora_downloads, lora_file, parse_lora
from ltx2_cli.weights.published import FOLDER_FILES, TEXT_ENCODER_FILES, UPSAMPLER_FILES

DECODERS = ("vae", "audio_vae", "vocoder")
DEVICE_PROFILES = {
    "gpu": "gpu",
    "TPU7x": "ironwood",
    "TPU v7x": "ironwood",
    "TPU v6 lite": "trillium",
    "TPU v6e": "trillium",
    "TPU v5 lite": "trillium",
    "TPU v5e": "trillium",
}


@dataclass(frozen=True)
class Declared:
    """The networks that a request uses, without their weights: the same on all devices."""

    checkpoint: Checkpoint
    networks: Networks
    added: Added  # by the LoRAs
    warnings: tuple[str, ...]  # about the LoRAs
    refinement: Refinement | None


@dataclass(frozen=True)
class Plan:
    """Everything a run needs to know before it reads a weight."""

    spec: RunSpec  # with the seed, the recipe and its values, and the sharding profile that were chosen
    checkpoint: Checkpoint
    networks: Networks  # without their weights
    added: Added  # by the LoRAs
    sharding: ShardingPlan  # of all but the denoisers
    prompts: tuple[str, ...]  # distinct, in the order of the passes that read them
    stages: tuple[Stage, ...]
    decoding: Decoding
    warnings: tuple[str, ...]  # what is legal and hardly meant, a sentence each

    def contexts(self, passes: tuple[Pass, ...]) -> tuple[int, ...]:
        """Which of the prompts each pass reads."""
        negative = self.prompts.index(self.spec.negative_prompt) if Pass.UNCOND in passes else 0
        return tuple(negative if each is Pass.UNCOND else 0 for each in passes)

    @property
    def arch(self) -> Arch:
        """What the networks are."""
        return self.checkpoint.arch

    @property
    def latent_shapes(self) -> AV[Shape]:
        """Those of one video in a file, when the last stage is done."""
        return self.stages[-1].shapes

    @property
    def batches(self) -> tuple[tuple[int, ...], ...]:
        """The seeds of the videos that are made at once."""
        at_once = self.spec.num_videos
        return tuple(self.spec.seeds[first : first + at_once] for first in range(0, len(self.spec.seeds), at_once))


def decodes_beside(plan: Plan) -> bool:
    """Whether the decoders and their work fit beside the denoisers, so that no clip waits for the last seed. A step
    computes in the room that decoding takes after it."""
    room = left(plan.spec, plan.networks, plan.added, plan.sharding, (DENOISER, REFINER, *DECODERS))
    return len(plan.batches) > 1 and room >= plan.decoding.bytes


def missing(spec: RunSpec) -> list[Download]:
    """The files that `resolve` would download first; none for what is a path here or in the cache.

    Raises `SpecError` where some of it can be had neither from the cache nor from the hub.
    """
    checkpoint = [(spec.checkpoint, FOLDER_FILES)]
    text_encoder = [] if spec.text_encoder is None else [(spec.text_encoder, TEXT_ENCODER_FILES)]
    second = expected_refinement(spec)
    refines = second.sigmas != ()  # None: at levels that the page of the model says, which is not open yet
    own = spec.refinement.upsampler is None and has_upsampler(path_of(spec.checkpoint))
    upsampler = [(second.upsampler, UPSAMPLER_FILES)] if refines and second.upsampler and not own else []
    adding = [*spec.lora, *(second.lora or () if refines else ())]
    loras, lost = attempt({lora: partial(lora_downloads, parse_lora(lora)[0]) for lora in adding})
    needed = [downloads(name, wanted) for name, wanted in (*checkpoint, *text_encoder, *upsampler)]
    absent = [file for files in (*loras.values(), *needed) for file in files if not file.cached]
    if absent:
        refuse(lost)
    return absent  # where nothing is to be fetched first, `resolve` says what is wrong with LoRAs and all else at once


def resolve(spec: RunSpec, source: Source | None = None) -> Plan:
    """Find the checkpoint, check it against what its configs declare, and decide all that the request left open.

    With latents `source` to go on from, there is the second stage alone, and the size is what it makes of
    them. Raises `SpecError` for a request or a checkpoint that cannot be met, with every finding of its kind.
    """
    checkpoint, loras = _open(spec)
    own = spec.refinement.upsampler is None and has_upsampler(checkpoint.where)
    spec = complete(spec, checkpoint.arch, TWO_STAGE if source else ONE_STAGE)
    if own:
        spec = replace(spec, refinement=replace(spec.refinement, upsampler=None))
    refinement = _open_refinement(spec, checkpoint) if spec.refinement.sigmas or source else None
    plan = decide(declare(spec, checkpoint, loras, refinement), spec, jax.devices(), source)
    if jax.process_count() > 1:
        _check_hosts(spec, plan.sharding)
    if spec.noise is not None and source is None:
        read_noise(spec.noise, plan.stages[0].shapes)
    return plan


def first_stage(plan: Plan) -> Plan:
    """The plan up to where a second stage goes on. Raises `SpecError` where there is none."""
    if len(plan.stages) == 1:
        raise SpecError(f"the recipe {plan.spec.recipe} has one stage", "--recipe two_stage, or no --stop-after")
    stage = plan.stages[0]
    room = _room(plan.spec, plan.networks, plan.added, plan.sharding)
    return replace(plan, stages=(stage,), decoding=_divided(plan.spec, plan.networks, stage, plan.sharding, room))


def _check_hosts(spec: RunSpec, sharding: ShardingPlan) -> None:
    """Raise `SpecError` for what each of several hosts would understand in another way, or leaves one without work."""
    if spec.seed is None:
        raise SpecError("several hosts need one seed between them", "--seed N")
    if sharding.mesh.size < jax.device_count():
        raise SpecError(
            f"one of {jax.device_count()} devices on {jax.process_count()} hosts would do all the work",
            "--sharding NAME or FILE of a profile with a mesh, or --num-processes 1 to run one host alone",
        )


def declare(spec: RunSpec, checkpoint: Checkpoint, loras: Loras, refinement: Refinement | None = None) -> Declared:
    """The networks of a request for this checkpoint, with these LoRAs at their strengths.

    Raises `SpecError` for LoRAs that do not fit them.
    """
    networks = checkpoint.networks(spec)
    added: Added = find_adapters(loras, networks, RENAMINGS)
    if refinement:
        networks, checkpoint, added = with_refiner(networks, checkpoint, added, refinement, spec.dtype)
    warnings = tuple(warning for lora, _ in loras for warning in unmet_wishes(lora))
    return Declared(checkpoint, networks, added, warnings, refinement)


def decide(declared: Declared, spec: RunSpec, devices: Sequence[jax.Device], source: Source | None = None) -> Plan:
    """What the request means for these networks on these devices. Raises `SpecError` where that cannot be met."""
    checkpoint, networks, refinement = declared.checkpoint, declared.networks, declared.refinement
    arch, added = checkpoint.arch, declared.added
    if refinement and source:
        spec = enlarged(spec, arch, refinement, source)
    if spec.max_sequence_length > (most := checkpoint.text_encoder.max_position_embeddings):
        raise SpecError(
            f"max_sequence_length {spec.max_sequence_length} is more than the text encoder's {most} tokens",
            f"--set max_sequence_length={most}",
        )
    spec = _settled(spec, arch, devices)
    declared_weights = [weight for module in networks.present().values() for weight in weights(module)]
    heads = {stream.name: stream.heads for stream in arch.transformer.streams}
    kernel, slow = choose_kernel(spec.sharding.attention, devices[0], spec.dtype, arch.head_sizes)
    lay = partial(lay_out, replace(spec.sharding, attention=kernel), devices, declared_weights, heads=heads)
    # also for a second stage alone: encoded and laid out as after the first, the text is the same to the bit
    passes = recipe_passes(spec, arch)
    sharding, guided = lay(len(passes) * spec.num_videos), Pass.UNCOND in passes
    networks = hold_refiner(spec, arch, networks, added, sharding)
    all_stages = stages(spec, arch, networks, refinement, source, lay)
    room = _room(spec, networks, added, sharding)
    decoding = _divided(spec, networks, all_stages[-1], sharding, room)
    prompts = tuple(dict.fromkeys([spec.prompt, *[spec.negative_prompt] * guided]))
    warnings = (
        *contradictions(spec, arch),
        *ignored(spec, arch, refinement.upsampler.upsampling.time if refinement else None),
        *((slow,) if slow else ()),
        *_gathered(sharding, arch.transformer.num_attention_heads),
        *declared.warnings,
        *_too_large(decoding, room),
        *_untrained(spec, checkpoint, all_stages, prompts),
    )
    return Plan(spec, checkpoint, networks, added, sharding, prompts, all_stages, decoding, warnings)


def _open(spec: RunSpec) -> tuple[Checkpoint, list[tuple[LoraFile, float]]]:
    """The headers of the checkpoint and of the LoRAs, each with its strength; all that is wrong is said at once."""
    loras, unread = attempt({str(i): partial(_open_lora, lora) for i, lora in enumerate(spec.lora)})
    opened, misread = attempt({spec.checkpoint: partial(_open_checkpoint, spec)})
    refuse([*misread, *unread])
    return opened[spec.checkpoint], list(loras.values())


def _open_refinement(spec: RunSpec, checkpoint: Checkpoint) -> Refinement:
    """The headers of what the second stage takes; all that is wrong with them is said at once."""
    loras = spec.refinement.lora or ()
    opened, misread = attempt({"upsampler": partial(_open_upsampler, spec.refinement.upsampler, checkpoint)})
    adding, unread = attempt({str(i): partial(_open_lora, lora) for i, lora in enumerate(loras)})
    refuse([*misread, *unread])
    return Refinement(*opened["upsampler"], [each for each in adding.values() if each[1]])


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
        raise SpecError(
            f"{spec.checkpoint} has a text encoder of its own",
            "--text-encoder is for single files: leave it out, or take back a record's by --set text_encoder=null",
        )
    if spec.text_encoder is None:
        raise SpecError(f"{spec.checkpoint} has no text encoder", "--text-encoder FOLDER or REPO names Gemma-3")
    return open_single_file(place, read_text_encoder(locate(spec.text_encoder, TEXT_ENCODER_FILES)))


def _settled(spec: RunSpec, arch: Arch, devices: Sequence[jax.Device]) -> RunSpec:
    """The request with what it left open filled in; raises `SpecError` for what the model cannot do."""
    _check_size(spec, arch)
    layers = arch.transformer.num_layers
    beyond = [block for block in spec.stg_blocks or () if block >= layers]
    if beyond and (spec.guidance.video.stg_scale or spec.guidance.audio.stg_scale):
        raise SpecError(
            f"STG block {beyond[0]} does not exist: the model has blocks 0 to {layers - 1}",
            f"--stg-blocks {layers - 1}, or --stg-scale 0 --audio-stg-scale 0 to do without",
        )
    seed = spec.seed if spec.seed is not None else (random_seed(spec),)
    auto = spec.sharding.profile == AUTO
    sharding = read_sharding(_device_profile(devices), spec.sharding) if auto else spec.sharding
    return replace(spec, seed=seed, sharding=sharding)


def _check_size(spec: RunSpec, arch: Arch) -> None:
    """Raise `SpecError` for a clip that this checkpoint's autoencoders cannot divide or decode."""
    frames, pixels = arch.compression.frames, arch.compression.pixels
    if spec.height % pixels or spec.width % pixels or (spec.num_frames - 1) % frames:
        raise SpecError(
            f"{spec.width}x{spec.height}x{spec.num_frames} does not divide into this model's latents",
            f"sides that are multiples of {pixels}, and {frames}k + 1 frames",
        )
    if min(spec.height, spec.width) < (smallest := arch.video_vae.smallest):
        raise SpecError(
            f"{spec.width}x{spec.height} is too small for this model's decoder", f"at least {smallest} pixels a side"
        )
    if round(spec.num_frames / spec.fps * arch.compression.audio_rate) < 1:
        raise SpecError(
            f"{spec.num_frames} frames at {spec.fps:g} a second are too short for sound",
            "more --num-frames or less --fps",
        )


def _device_profile(devices: Sequence[jax.Device]) -> str:
    """The profile for these devices; raises `SpecError` where they are several of an unknown kind."""
    platform, kind = devices[0].platform, devices[0].device_kind
    if platform == "cpu" or len(devices) == 1:
        return "single"
    for known, profile in DEVICE_PROFILES.items():
        if kind.startswith(known) or platform == known:
            return profile
    known = ", ".join(f"--sharding {name}" for name in profile_names("sharding"))
    raise SpecError(
        f"no sharding profile is made for {len(devices)} devices of kind {kind}", f"name one: {known}, or a FILE"
    )


def _gathered(sharding: ShardingPlan, heads: int) -> Iterator[str]:
    """A sentence if self-attention cannot trade tokens for heads."""
    local, parts = heads // sharding.parts("heads"), sharding.parts("tokens")
    if local % parts:
        yield (
            f"{local} attention heads do not divide by the {parts} devices that split the tokens: each of them gathers"
            " all keys and values; fewer devices along that axis, or --sharding with another mesh, would not"
        )


def _room(spec: RunSpec, networks: Networks, added: Added, sharding: ShardingPlan) -> float:
    """Bytes on each device that decoding may take."""
    if spec.vae_memory is not None:
        return spec.vae_memory * 1e9
    return left(spec, networks, added, sharding, DECODERS)


def _divided(spec: RunSpec, networks: Networks, last: Stage, sharding: ShardingPlan, room: float) -> Decoding:
    """How what the last stage makes is decoded."""
    clip = last.geometry
    size = clip.frames, clip.height, clip.width
    return divide(networks.vae.decoder, spec.num_videos, size, sharding.mesh.devices.ravel(), room)


def _untrained(
    spec: RunSpec, checkpoint: Checkpoint, all_stages: Sequence[Stage], prompts: Sequence[str]
) -> Iterator[str]:
    """A sentence for all of the request that the model was not trained on, as far as its checkpoint lists that."""
    trained_on = read_trained_on(checkpoint.where)
    if trained_on is None:
        return
    pixels = checkpoint.arch.compression.pixels
    sizes = [(pixels * stage.geometry.width, pixels * stage.geometry.height) for stage in all_stages]
    yield from clip_warnings(trained_on, sizes, spec.num_frames, spec.fps)
    for prompt in prompts:
        yield from prompt_warnings(trained_on, checkpoint.tokenizer, prompt)


def _too_large(decoding: Decoding, room: float) -> Iterator[str]:
    if decoding.bytes > room:
        yield (
            f"decoding takes about {natural(decoding.bytes)} on a device that has {natural(max(room, 0))} for it;"
            " fewer --num-frames, a smaller --height or --width, or more devices"
        )
