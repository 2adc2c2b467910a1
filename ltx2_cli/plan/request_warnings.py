"""Warnings about a complete request, and checks of its clip against a checkpoint."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ltx2_cli.chips import chip
from ltx2_cli.diffusion.geometry import Geometry
from ltx2_cli.errors import UsageError
from ltx2_cli.media.audio import Audio
from ltx2_cli.media.videos import Video
from ltx2_cli.models.arch import Arch
from ltx2_cli.models.lora import makes_hdr
from ltx2_cli.models.networks import Checkpoint, Networks
from ltx2_cli.parallel.devices import computes_in_float32
from ltx2_cli.plan.edit import Edit, edit_remark, edited
from ltx2_cli.plan.inputs import PlanInputs
from ltx2_cli.plan.recipe import (
    DFR,
    DFR_SPATIAL,
    DFR_TEMPORAL,
    DISTILLED,
    FOR_DISTILLED,
    HQ,
    ONE_STAGE,
    TWO_STAGE,
    makes_few_steps,
    says_distilled,
)
from ltx2_cli.plan.stages import Stage
from ltx2_cli.plan.windows import fewest_windows
from ltx2_cli.request.profiles import recipe_defaults
from ltx2_cli.request.size import LONGEST_SECONDS, longest_clip
from ltx2_cli.request.spec import EIGHT_BITS, NO_GUIDANCE, ComputeType, DType, RunSpec, WeightType
from ltx2_cli.request.spelling import option_name, typed
from ltx2_cli.request.validation import spec_problems
from ltx2_cli.weights.checkpoint import AGAIN, read_json
from ltx2_cli.weights.declare import weights
from ltx2_cli.weights.lora import parse_lora, stated_version
from ltx2_cli.weights.quantized_matrix import QuantizedMatrix
from ltx2_cli.weights.tensors import MatrixType
from ltx2_cli.weights.transfer import LoraDeltas

SLOWEST, FASTEST = 23, 30  # frames a second: recipes are published for 24 to 30, at 48 users report blurred motion
MAX_STRENGTH = 10  # of a LoRA; usual are 0.5 to 1.5


def recipe_warnings(spec: RunSpec, arch: Arch) -> Iterator[str]:
    """Sentences on mismatches between a complete request and its checkpoint, each with an option to type."""
    yield from request_warnings(spec)
    distilled = makes_few_steps(spec, arch)
    guided = [
        typed(f"guidance.{stream}.guidance_scale", 1)
        for stream, scales in vars(spec.guidance).items()
        if scales.guidance_scale not in (None, 1.0)
    ]
    if spec.nag_scale is not None and guided:
        one = " ".join(guided)
        yield f"nag_scale and guidance_scale both lead away from the negative prompt, and add up; without a pass: {one}"
    if spec.recipe == ONE_STAGE and distilled:
        yield f"this model is distilled, the recipe `one_stage` is not for it: {typed('recipe', DISTILLED)}"
    if spec.recipe not in FOR_DISTILLED:
        return
    if not distilled and not any(strength for _, strength in map(parse_lora, spec.lora)):
        upsamples = spec.recipe in (DFR_TEMPORAL, DFR_SPATIAL)
        cure = f"no {option_name('recipe')}" if upsamples else typed("recipe", ONE_STAGE)
        yield f"this model is not distilled, the recipe `{spec.recipe}` is not for it: {cure}"
        return
    unguided = " ".join(
        typed(f"guidance.{stream}.{name}", vars(NO_GUIDANCE)[name])
        for stream, scales in vars(spec.guidance).items()
        for name in ("guidance_scale", "stg_scale", "modality_scale")  # rescaling has nothing to do then
        if vars(scales)[name] != vars(NO_GUIDANCE)[name]
    )
    if unguided:
        yield f"guidance costs a distilled model time and gains it nothing; without: {unguided}"
    steps = recipe_defaults(spec, spec.recipe).num_inference_steps
    if spec.num_inference_steps != steps:
        fitting = typed("num_inference_steps", steps)
        yield f"a distilled model was made for {steps} steps, not {spec.num_inference_steps}: {fitting}"


def condition_remarks(spec: RunSpec, videos: Sequence[Video], audio: Audio | None, edit: Edit | None) -> Iterator[str]:
    """Sentences on the used part of each input video and audio, on their reading, and on the edit."""
    for video in videos:
        cropped = video.cropped(spec.height, spec.width)
        if remarks := [*video.remarks, *([cropped] if cropped else [])]:
            yield f"{video.path}: {'; '.join(remarks)}"
    if audio and (heard := audio.heard(spec.num_frames / spec.fps)):
        yield f"{audio.path}: {heard}"
    if edit:
        yield edit_remark(spec, videos[edit.number], edit)


def request_warnings(spec: RunSpec) -> Iterator[str]:
    """Sentences on a recipe that the request cannot use, and on LoRAs with unusual strengths or named twice."""
    if spec.recipe == HQ and not any(says_distilled(name) for name, _ in map(parse_lora, spec.lora)):
        wanted = " ".join(typed("lora", [lora]) for lora in (*spec.lora, *(spec.second_stage.lora or ())))
        if spec.second_stage.lora:
            yield f"the recipe `hq` has the LoRA that distills the model also in its first stage: {wanted}"
    if not spec.running.video and spec.recipe in (TWO_STAGE, HQ, DFR):
        yield f"the recipe `{spec.recipe}` makes one stage, there is no video to upsample: no {option_name('recipe')}"
    for loras in (spec.lora, spec.second_stage.lora or ()):
        parsed = [parse_lora(lora) for lora in loras]
        for name, strength in parsed:
            if abs(strength) > MAX_STRENGTH:
                usual = typed("lora", [f"{name}:1"])
                yield f"the strength {strength:g} of {name} is beyond what LoRAs are made for: {usual}"
        for name, number in Counter(name for name, _ in parsed).items():
            if number > 1:
                yield f"{name} is added {number} times; once is {typed('lora', [name])}"


def check_clip(spec: RunSpec, arch: Arch) -> None:
    """Raise `UsageError` for a clip that this checkpoint cannot make."""
    if spec.max_sequence_length > (most := arch.text_encoder.max_position_embeddings):
        sentence = f"max_sequence_length {spec.max_sequence_length} is more than the text encoder's {most} tokens"
        raise UsageError(sentence, typed("max_sequence_length", most))
    frames, pixels, size = arch.compression.frames, arch.compression.pixels, f"{spec.width}x{spec.height}"
    if spec.height % pixels or spec.width % pixels or (spec.num_frames - 1) % frames:
        hint = f"sides that are multiples of {pixels}, and {frames}k + 1 frames"
        raise UsageError(f"{size}x{spec.num_frames} does not divide into this model's latents", hint)
    if min(spec.height, spec.width) < (smallest := arch.vae.smallest):
        raise UsageError(f"{size} is too small for this model's decoder", f"at least {smallest} pixels a side")
    if spec.running.audio and round(spec.num_frames / spec.fps * arch.compression.audio_rate) < 1:
        sentence = f"{spec.num_frames} frames at {spec.fps:g} a second are too short for audio"
        raise UsageError(sentence, f"more {option_name('num_frames')} or less {option_name('fps')}")
    layers = arch.transformer.num_layers
    absent_blocks = [block for block in spec.stg_blocks or () if block >= layers]
    if absent_blocks and (spec.guidance.video.stg_scale or spec.guidance.audio.stg_scale):
        without = " ".join(typed(f"guidance.{stream}.stg_scale", 0) for stream in vars(spec.guidance))
        hint = f"{typed('stg_blocks', [layers - 1])}, or {without} to do without"
        raise UsageError(f"STG block {absent_blocks[0]} does not exist: the model has blocks 0 to {layers - 1}", hint)


def _of_loras(deltas: Mapping[str, LoraDeltas], model_version: str) -> Iterator[str]:
    """Sentences on LoRAs whose file states that it was made for another model version with the same layers, or that it
    makes HDR."""
    sums = (delta for network in deltas.values() for delta in network.values())
    for lora in {lora.path: lora for delta in sums for lora, _, _ in delta.parts}.values():
        made_for = stated_version(lora)
        if made_for not in (None, model_version):
            yield f"{lora.path} was made for {made_for}: {model_version} has the same layers, with other weights"
        if makes_hdr(lora):
            light = f"its light: {typed('save_latents', 'FILE')}, and `ltx2 decode FILE --hdr`"
            yield f"{lora.path} makes HDR in LogC3, which an mp4 shows with little contrast; {light}"


def checkpoint_warnings(spec: RunSpec, inputs: PlanInputs, stages: Sequence[Stage]) -> Iterator[str]:
    """Sentences about a clip unlike the training clips, about matrices that are rounded, about products that the
    devices only emulate or widen, and about LoRAs of another model version or of HDR."""
    checkpoint = inputs.checkpoint
    yield from _untrained(spec, checkpoint, stages)
    if any(stage.source and stage.geometry.generated > stage.source_keyframes for stage in stages):
        yield "the keyframes of the second stage begin as noise: none are upsampled from the first"
    yield from _rounded(spec, checkpoint, inputs.networks)
    yield from _emulated(checkpoint.matrices(spec).transformer, stages)
    yield from _widened(spec, checkpoint.matrices(spec).transformer, stages)
    yield from _of_loras(inputs.lora_deltas, checkpoint.arch.model_version)


def _emulated(kind: MatrixType | None, stages: Sequence[Stage]) -> Iterator[str]:
    known = chip(stages[0].sharding.mesh.devices.flat[0].device_kind) if stages else None
    if known and kind and kind.rounds_input and known.rate(kind.name) == known.flops:
        better = [typed("weights", name) for name in EIGHT_BITS if known.rate(name) > known.flops]
        better.append(typed("compute", "weights"))
        slow = f"emulates products of {kind.of_inputs.name}, slower than those of bfloat16"
        yield f"a {known.name} {slow}: {', or '.join(better)}"


def _widened(spec: RunSpec, kind: MatrixType | None, stages: Sequence[Stage]) -> Iterator[str]:
    device = stages[0].sharding.mesh.devices.flat[0] if stages else None
    known = device and chip(device.device_kind)
    sixteen_bits = spec.dtype is DType.bfloat16 and spec.compute is not ComputeType.full
    if known and sixteen_bits and computes_in_float32(device) and known.int8_ops > known.flops:
        faster = " ".join([*(() if kind else (typed("weights", "int8"),)), typed("compute", "full")])
        rate = f"{known.int8_ops / known.flops:.0f} times the rate"
        yield f"a {known.name} multiplies bfloat16 in float32; {faster} multiplies in int8, at {rate}"


def _untrained(spec: RunSpec, checkpoint: Checkpoint, stages: Sequence[Stage]) -> Iterator[str]:
    """Sentences about a size, length or frame rate outside the training data, if the checkpoint lists its own, else
    about a length of more than 20 s and unusual frame rates."""
    last, scale = stages[-1], checkpoint.arch.compression
    whole, edits = last.geometry, edited(spec) is not None
    made = scale.clip_size(last.largest_window.geometry.frames, 1, 1)[0] if len(last.windows) > 1 else spec.num_frames
    if (trained_on := read_trained_on(checkpoint.where)) is None:
        if made > (longest := longest_clip(spec.fps)):
            cure = typed("num_frames", longest) + _in_windows(spec, whole, longest)
            yield f"models were trained on at most {LONGEST_SECONDS} s, not on {made / spec.fps:.1f}: {cure}"
        yield from _unusual_rates(spec, stages)
        return
    pixels = scale.pixels
    sizes = [(pixels * stage.geometry.width, pixels * stage.geometry.height) for stage in stages]
    # An edit may not allow the cure, and is as long as the regenerated part needs.
    num_frames = max(made, *trained_on.num_frames) if edits else made
    in_windows = _in_windows(spec, whole, max(trained_on.num_frames))
    for sentence, cure in clip_warnings(trained_on, sizes, num_frames, spec.fps, in_windows):
        yield sentence if edits else f"{sentence}: {cure}"


def _in_windows(spec: RunSpec, clip: Geometry, longest: int) -> str:
    """The windows of at most `longest` frames that make this clip, to type; empty where windows do not go."""
    in_windows = replace(spec, windows=fewest_windows(spec, clip, longest) or 1)
    fit = in_windows.windows > 1 and not any(spec_problems(in_windows))
    return f", or {typed('windows', in_windows.windows)}" if fit else ""


def _unusual_rates(spec: RunSpec, stages: Sequence[Stage]) -> Iterator[str]:
    """A sentence on the frame rate of a clip that starts from noise; an upsampled or edited one has that of another."""
    new = spec.running.video and edited(spec) is None
    for rate in (stage.geometry.fps for stage in stages if new and stage.source is None):
        if not SLOWEST <= rate <= FASTEST:
            usual = typed("fps", 24 if rate < SLOWEST else FASTEST)
            yield f"models are used at 24 to {FASTEST} frames a second; at {rate:g}, motion may be wrong: {usual}"


def _rounded(spec: RunSpec, checkpoint: Checkpoint, networks: Networks) -> Iterator[str]:
    """A sentence for each network whose file has most matrices of its layers in eight bits, but not all."""
    kinds = checkpoint.matrices(spec)._asdict() if spec.weights is WeightType.auto else {}
    for name, kind in kinds.items():
        declared = weights(networks.present()[name])
        held = (weight for weight in declared if isinstance(weight.get_value(), QuantizedMatrix))
        files = [checkpoint.files[name].get(tensor) for weight in held for tensor, _ in weight.tensors()]
        kind = kind and kind._replace(rounds_input=False)
        others = sum(tensor is not None and tensor.matrix_type != kind for tensor in files)
        if others:
            yield (
                f"{others} of {len(files)} matrices of the {name.replace('_', ' ')} are not {kind} in its file, and are"
                f" rounded to it: {typed('weights', 'bfloat16')} rounds none"
            )


TRAINED_ON_FILE = "trained_on.json"


@dataclass(frozen=True)
class TrainedOn:
    """Sizes, lengths and frame rates of the training clips."""

    sizes: tuple[str, ...]  # WIDTHxHEIGHT
    num_frames: tuple[int, ...]
    fps: tuple[float, ...]


def read_trained_on(folder: Path) -> TrainedOn | None:
    """The list in a checkpoint's `folder`, or None. Raises `UsageError` if it is damaged."""
    path = folder / TRAINED_ON_FILE
    if not path.exists():
        return None
    values = read_json(path)
    try:
        sizes, num_frames = tuple(map(str, values["sizes"])), tuple(map(int, values["num_frames"]))
        return TrainedOn(sizes, num_frames, tuple(map(float, values["fps"])))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} does not list sizes, num_frames and fps: {error}", AGAIN) from None


def clip_warnings(
    trained_on: TrainedOn, sizes: list[tuple[int, int]], num_frames: int, fps: float, in_windows: str = ""
) -> Iterator[tuple[str, str]]:
    """A sentence for each difference between a clip and the training clips, with an option to type. `sizes`: width and
    height of each stage; `in_windows`: what to type besides for a clip that is too long."""
    known = (size.split("x") for size in trained_on.sizes)
    options = [f"{typed('width', width)} {typed('height', height)}" for width, height in known]
    untrained = [f"{width}x{height}" for width, height in sizes if f"{width}x{height}" not in trained_on.sizes]
    if untrained:
        stage = ", the size of the first stage" if len(sizes) > 1 else ""
        sentence = f"the model was trained at {' and '.join(trained_on.sizes)} pixels, not at {untrained[0]}{stage}"
        yield sentence, options[-1 if stage else 0]
    if num_frames not in trained_on.num_frames:
        frames = trained_on.num_frames[0]
        sentence = f"the model was trained on clips of {frames} frames, not of {num_frames}"
        yield sentence, typed("num_frames", frames) + in_windows
    if fps not in trained_on.fps:
        rate = f"{trained_on.fps[0]:g}"
        yield f"the model was trained at {rate} frames a second, not at {fps:g}", typed("fps", rate)
