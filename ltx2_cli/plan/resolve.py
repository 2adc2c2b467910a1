"""`resolve(RunSpec) -> Plan`: all decisions about a run, made here alone. Reads no weights."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax

from ltx2_cli.diffusion.denoise import Pass
from ltx2_cli.diffusion.latents import LatentShape, read_noise
from ltx2_cli.errors import UsageError
from ltx2_cli.media.audio import Audio
from ltx2_cli.models.arch import Arch
from ltx2_cli.models.networks import DENOISER
from ltx2_cli.nn.kernels.dispatch import choose_backend
from ltx2_cli.parallel.hosts import ALONE
from ltx2_cli.parallel.mesh import ShardingPlan, lay_out, num_slices
from ltx2_cli.plan import conditions, recipe, request_warnings, stages
from ltx2_cli.plan.audio_tiles import no_audio, plan_audio
from ltx2_cli.plan.decoding import DecodePlan, bytes_left_after, plan_pixel_tiles, plan_tiling, window_budget
from ltx2_cli.plan.edit import Edit, edit_of, shown_audio
from ltx2_cli.plan.inputs import AUDIO_ENCODER, STAGE2_DENOISER, VIDEO_ENCODER, PlanInputs, network_values, open_inputs
from ltx2_cli.plan.layout import check_reference_layout, choose_layout, layout_warnings
from ltx2_cli.plan.open import find_diffusion_decoder, open_checkpoint, open_loras, open_second_stage
from ltx2_cli.plan.phases import Denoise, Phase, Upsample
from ltx2_cli.plan.positions import weights_references
from ltx2_cli.plan.stages import InitialLatents, Stage
from ltx2_cli.plan.step_cost import step_of
from ltx2_cli.plan.unused import ResolvedRequest, unused_options
from ltx2_cli.request.spec import Decoder, DType, RunSpec, Streams
from ltx2_cli.request.spelling import typed
from ltx2_cli.weights.checkpoint import collect
from ltx2_cli.weights.declare import kinds
from ltx2_cli.weights.published import DIFFUSION_DECODER, NETWORKS

DECODERS = ("vae", DIFFUSION_DECODER, "audio_vae", "vocoder")  # of which a run has one for the video


@dataclass(frozen=True)
class Plan(PlanInputs):
    """All decisions about a run, made before weights are read."""

    spec: RunSpec  # the complete request, for records
    arch: Arch
    sharding: ShardingPlan  # of all but the denoisers
    layout: str  # why the passes of a step lie as they do; empty: there was no choice
    dtype: DType  # of all but the text encoder
    text_encoder_dtype: DType
    compile_text_encoder: bool
    keep_resident: bool  # every network stays in memory
    compile_cache: str | None  # folder of compiled programs, or `off`; None: the user's
    prompts: tuple[str, ...]  # the prompt, or those of a batch, then the negative prompt if it is read and another
    texts: tuple[tuple[str, ...], ...]  # of each video of a batch, the prompts of its segments
    text_tokens: int  # of each
    prompts_at_once: int  # that the text encoder reads in a batch
    stages: tuple[Stage, ...]
    running: Streams[bool]  # the streams that are made
    num_frames: int  # of a clip
    edit: Edit | None  # of a clip that is edited; None: clips are all new
    condition_audio: Audio | None  # that conditions the stages: the input audio, or that of the edited clip
    decoding: DecodePlan
    seeds: tuple[int, ...]  # of each video
    batch_size: int  # videos of these that are made at once
    at_once: int  # videos that are made at once, with those of other requests
    replicated: tuple[str, ...]  # the networks whose weights lie whole on every device
    warnings: tuple[str, ...]  # sentences about what is legal but probably unintended

    @property
    def network_values(self) -> tuple[object, ...]:
        """Equal if two plans have the same networks."""
        return network_values(self.spec)

    def network(self, name: str) -> Any:
        """The network `name` without its weights; `STAGE2_DENOISER` has the declaration of the denoiser."""
        return self.networks.present()[DENOISER if name == STAGE2_DENOISER else name]

    @property
    def video_decoder(self) -> str:
        """The name of the network that makes frames."""
        return DIFFUSION_DECODER if self.networks.diffusion_decoder else "vae"

    @property
    def latent_shapes(self) -> Streams[LatentShape]:
        """Shapes of the last stage's latents in a file, of one video."""
        return self.stages[-1].shapes

    @property
    def batches(self) -> tuple[tuple[int, ...], ...]:
        """The seeds of each batch."""
        size = self.batch_size
        return tuple(self.seeds[first : first + size] for first in range(0, len(self.seeds), size))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases between text encoding and decoding, in order."""
        phases: list[Phase] = []
        for number, stage in enumerate(self.stages):
            phases += [Upsample(number, stage)] if stage.source else []
            phases += [Denoise(number, stage, window) for window in range(len(stage.windows)) if stage.steps]
        return tuple(phases)


def resolve(spec: RunSpec, source: InitialLatents | None = None, networks: Collection[str] = NETWORKS) -> Plan:
    """Find the checkpoint, check it against its configs, and decide everything that the request leaves open.

    With latents `source` the plan has the second stage alone, and its size follows from theirs. With some of a
    checkpoint's `networks` it is for a command that reads these alone. Raises `UsageError` with all problems of a
    kind, for a request or checkpoint that cannot be run.
    """
    if jax.process_count() > 1 and spec.seed is None:
        raise UsageError("several hosts need one seed between them", typed("seed", "N"))
    plan = _plan(spec, jax.devices(), source, networks, offline=False)
    if jax.process_count() > 1 and plan.sharding.mesh.size < jax.device_count():
        alone = f"one of {jax.device_count()} devices on {jax.process_count()} hosts would do all the work"
        hint = f"{typed('sharding', 'NAME')} or FILE of a profile with a mesh, or {ALONE}"
        raise UsageError(alone, hint)
    if spec.initial_noise is not None and source is None:
        read_noise(spec.initial_noise, plan.stages[0].shapes)
    return plan


def plan_offline(
    spec: RunSpec,
    devices: Sequence[jax.Device],
    source: InitialLatents | None = None,
    networks: Collection[str] = NETWORKS,
) -> Plan:
    """As `resolve`, for devices that need not exist and without downloads: absent files are described by published
    configs. LoRAs may be absent: merged LoRAs take no memory."""
    return _plan(spec, devices, source, networks, offline=True)


def _plan(
    spec: RunSpec,
    devices: Sequence[jax.Device],
    source: InitialLatents | None,
    networks: Collection[str],
    offline: bool,
) -> Plan:
    named = spec.checkpoint, spec.text_encoder, spec.transformer
    opened, problems = collect({spec.checkpoint: partial(open_checkpoint, *named, offline, networks)})
    loras = open_loras(spec.lora, offline, problems)
    checkpoint = opened[spec.checkpoint]
    if source is None:  # a first stage alone follows references
        spec = conditions.with_reference_scale(spec, loras)
    spec = recipe.complete_request(spec, checkpoint, devices, source is not None)
    second_stage = open_second_stage(spec, checkpoint, offline) if spec.second_stage.sigmas or source else None
    by_diffusion = spec.decoder is Decoder.diffusion and spec.running.video
    decoder = find_diffusion_decoder(spec.checkpoint, checkpoint.arch, offline) if by_diffusion else None
    return build_plan(open_inputs(spec, checkpoint, loras, second_stage, decoder), spec, devices, source)


def stage1_plan(plan: Plan) -> Plan:
    """The plan of the first of two stages alone. Raises `UsageError` for a plan of one stage."""
    if len(plan.stages) == 1:
        hint = f"{typed('recipe', recipe.TWO_STAGE)}, or no --draft"
        raise UsageError(f"the recipe {plan.spec.recipe} has one stage", hint)
    decoding, _ = plan_decoding(plan.spec, plan, plan.stages[0], plan.sharding)
    return replace(plan, stages=plan.stages[:1], decoding=decoding)


def build_plan(
    inputs: PlanInputs, spec: RunSpec, devices: Sequence[jax.Device], source: InitialLatents | None = None
) -> Plan:
    """The plan of a complete request for these inputs and devices. Raises `UsageError` if it cannot be run."""
    arch, networks, by = inputs.checkpoint.arch, inputs.networks, inputs.upsampling
    spec = stages.upsampled_spec(spec, arch, by, source) if by and source else spec
    spec = conditions.with_what_was_read(spec, arch.compression, inputs.input_videos, inputs.input_audio)
    request_warnings.check_clip(spec, arch)
    sizes = stages.measure_stages(spec, arch, inputs.input_videos, by, source)
    placed = [weight for module in networks.present().values() for alike in kinds(module) for weight in alike]
    weighted, heads = weights_references(spec), {stream.name: stream.heads for stream in arch.transformer.streams}
    kernel, slow = choose_backend(spec.sharding.attention, devices[0], spec.dtype, arch.head_sizes, weighted)
    lay = partial(lay_out, replace(spec.sharding, attention=kernel), devices, placed, heads=heads, offload=spec.offload)
    # also for a second stage alone: encoded and laid out as after the first, the text is the same to the bit
    guidance, step_passes = stages.recipe_guidance(spec, arch), stages.first_passes(spec, arch, sizes[0].at_once)
    passes, prompts = max(step_passes, key=len), _distinct_prompts(spec, step_passes)
    steps = [step_of(spec, arch.transformer, sizes[0].at_once, each, len(prompts)) for each in step_passes]
    side_by_side = lay(len(passes) * spec.num_videos)
    together = side_by_side if num_slices(devices) > 1 and not by else lay(spec.num_videos)  # slices share rows
    sharding, layout = choose_layout(steps, together, side_by_side)
    all_stages = stages.build_stages(spec, inputs, sizes, source, sharding, together if by else sharding)
    if weighted:
        check_reference_layout(all_stages[0].sharding, arch.transformer.num_attention_heads)
    decoding, decode_budget = plan_decoding(spec, inputs, all_stages[-1], sharding)
    edit = edit_of(spec, inputs.input_videos, all_stages[-1].geometry)
    warnings = (
        *request_warnings.recipe_warnings(spec, arch),
        *unused_options(ResolvedRequest(spec, guidance, by.time if by else None, source is not None)),
        *((slow,) if slow else ()),
        *request_warnings.condition_remarks(spec, inputs.input_videos, inputs.input_audio, edit),
        *layout_warnings(sharding, arch.transformer.num_attention_heads, decoding, decode_budget),
        *request_warnings.checkpoint_warnings(spec, inputs, all_stages),
    )
    return Plan(
        **{field.name: vars(inputs)[field.name] for field in fields(PlanInputs)},
        spec=spec,
        arch=arch,
        sharding=sharding,
        layout=layout if all_stages[0].sharding == sharding else "",
        dtype=spec.dtype,
        text_encoder_dtype=spec.text_encoder_dtype,
        compile_text_encoder=spec.compile_text_encoder,
        keep_resident=spec.keep_resident,
        compile_cache=spec.compile_cache,
        prompts=prompts,
        texts=((spec.prompt, *(segment.prompt for segment in spec.segments)),) * spec.num_videos,
        text_tokens=spec.max_sequence_length,
        prompts_at_once=len(prompts) if spec.sharding.use_batched_text_encoder else 1,
        stages=all_stages,
        running=spec.running,
        num_frames=spec.num_frames,
        edit=edit,
        condition_audio=inputs.input_audio or shown_audio(spec, inputs.input_videos),
        decoding=decoding,
        seeds=spec.seeds,
        batch_size=spec.num_videos,
        at_once=spec.num_videos,
        replicated=(*DECODERS, VIDEO_ENCODER, AUDIO_ENCODER) if spec.sharding.replicate_vae else (),
        warnings=warnings,
    )


def _distinct_prompts(spec: RunSpec, steps: Sequence[Collection[Pass]]) -> tuple[str, ...]:
    """The prompts, and last the negative prompt if it is another and a pass or the attention to the text reads it."""
    reads_negative = any(Pass.UNCOND in passes for passes in steps) or spec.nag_scale is not None
    texts, last = [spec.prompt, *(segment.prompt for segment in spec.segments)], [spec.negative_prompt] * reads_negative
    return tuple(dict.fromkeys([*(text for text in texts if not spec.segments or text not in last), *last]))


def plan_decoding(spec: RunSpec, inputs: PlanInputs, last: Stage, sharding: ShardingPlan) -> tuple[DecodePlan, float]:
    """The decoding plan of the last stage, and the memory budget of each device for it, in bytes."""
    networks, clip = inputs.networks, last.geometry
    if spec.vae_memory_gb is not None:
        decode_budget = spec.vae_memory_gb * 1e9
    else:
        decode_budget = bytes_left_after(spec.keep_resident, networks, sharding, DECODERS)
    # without video, one latent frame: the mesh is also that of the audio
    size, devices = (max(clip.frames, 1), clip.height, clip.width), sharding.mesh.devices.ravel()
    windows, audio = len(last.windows), no_audio
    if spec.running.audio and inputs.input_audio is None:
        arch = inputs.checkpoint.arch
        audio = partial(plan_audio, arch, networks, clip.audio_frames, windows, devices[0], decode_budget)
    if networks.diffusion_decoder:
        plan = plan_pixel_tiles(networks.diffusion_decoder, spec.num_videos, size, devices, decode_budget, audio)
        return plan, decode_budget
    assert networks.vae is not None
    decoder, budget = networks.vae.decoder, decode_budget
    if windows > 1 and spec.vae_memory_gb is None:
        budget = window_budget(decoder, spec.num_videos, size, last.largest_window.geometry.frames, devices, budget)
    decoding = plan_tiling(decoder, spec.num_videos, size, devices, budget, audio)
    return decoding if spec.running.video else replace(decoding, video_bytes=0), decode_budget
