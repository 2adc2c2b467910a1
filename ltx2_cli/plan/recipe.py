"""The recipe that a checkpoint was published with, and what it fills in; and what speaks against a request, of a small
model also the training data that its folder lists, in `trained_on.json`."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from textwrap import shorten

import jax
from tokenizers import Tokenizer

from ltx2_cli.chips import chip
from ltx2_cli.diffusion.denoise import Schedule
from ltx2_cli.errors import UsageError
from ltx2_cli.media.audio import Audio
from ltx2_cli.media.videos import Video
from ltx2_cli.models.arch import Arch
from ltx2_cli.models.networks import Checkpoint
from ltx2_cli.models.upsampler import has_upsampler
from ltx2_cli.parallel.mesh import ShardingPlan
from ltx2_cli.plan.decoding import DecodePlan
from ltx2_cli.plan.edit import edited
from ltx2_cli.plan.stages import Stage
from ltx2_cli.request.profiles import AUTO, checkpoint_names, complete_spec, profile_names, recipe_defaults
from ltx2_cli.request.size import LONGEST_SECONDS, longest_clip
from ltx2_cli.request.spec import NO_GUIDANCE, RunSpec
from ltx2_cli.request.spelling import option, typed
from ltx2_cli.request.validation import random_seed
from ltx2_cli.units import quantity
from ltx2_cli.weights.checkpoint import AGAIN, read_json
from ltx2_cli.weights.lora import parse_lora
from ltx2_cli.weights.published import CATALOG

ONE_STAGE, TWO_STAGE, DISTILLED = "one_stage", "two_stage", "distilled"
NEGATIONS = {"de", "non", "not", "un"}  # de-distilled: made to want guidance again
MAX_STRENGTH = 10  # of a LoRA; usual are 0.5 to 1.5
NOT_DISTILLED = {"dev", "undistilled"}


def complete_request(
    spec: RunSpec, checkpoint: Checkpoint, devices: Sequence[jax.Device], from_latents: bool
) -> RunSpec:
    """`spec` with all values: its recipe's, the sharding profile's of the devices, a seed. An upsampler in the
    checkpoint's folder is preferred to the recipe's."""
    own = spec.second_stage.upsampler is None and has_upsampler(checkpoint.where)
    seed = spec.seed if spec.seed is not None else (random_seed(spec),)
    sharding = _device_profile(devices) if spec.sharding.profile == AUTO else AUTO
    spec = apply_recipe(replace(spec, seed=seed), checkpoint.arch, TWO_STAGE if from_latents else ONE_STAGE, sharding)
    second = replace(spec.second_stage, upsampler=None) if own else spec.second_stage
    return replace(spec, second_stage=second if spec.running.video else replace(second, sigmas=(), lora=()))


def apply_recipe(spec: RunSpec, arch: Arch, usual: str = ONE_STAGE, sharding: str = AUTO) -> RunSpec:
    """`spec` with its recipe, and the recipe's values where none was asked for. `usual`: if not distilled."""
    usual = DISTILLED if _by_lora(spec) or is_distilled(spec.checkpoint, arch.scheduler) else usual
    recipe = usual if spec.recipe == AUTO else spec.recipe
    return _with_sigmas(spec, complete_spec(spec, recipe, sharding, arch.model_version, arch.transformer.num_layers))


def guess_request(spec: RunSpec, from_latents: bool = False) -> RunSpec:
    """`spec` with its recipe as far as names tell of it, before the checkpoint is open."""
    distilled = _by_lora(spec) or _says_distilled(spec.checkpoint)
    usual = DISTILLED if distilled else TWO_STAGE if from_latents else ONE_STAGE
    recipe = usual if spec.recipe == AUTO else spec.recipe
    return _with_sigmas(spec, complete_spec(spec, recipe, AUTO, guess_model_version(spec)))


def guess_model_version(spec: RunSpec) -> str | None:
    """The model version of a published checkpoint."""
    versions = [entry.model_version for entry in CATALOG if entry.name == spec.checkpoint.split("@")[0]]
    return versions[0].lower().replace("-", "") if versions else None


def _with_sigmas(spec: RunSpec, complete: RunSpec) -> RunSpec:
    """`complete` with its recipe's noise levels for as many steps as it has, where `spec` asks for none."""
    if spec.sigmas is not None or complete.sigmas is None or complete.num_inference_steps is None:
        return complete
    return replace(complete, sigmas=resample_sigmas(complete.sigmas, complete.num_inference_steps))


def resample_sigmas(sigmas: tuple[float, ...], steps: int) -> tuple[float, ...]:
    """Interpolate noise levels [n + 1] linearly to [steps + 1]; unchanged where n == steps."""
    levels = []
    for step in range(steps + 1):
        below, part = divmod(step * (len(sigmas) - 1), steps)
        level, after = sigmas[below], sigmas[min(below + 1, len(sigmas) - 1)]
        levels.append(level + (after - level) * part / steps)
    return tuple(levels)


def recipe_warnings(spec: RunSpec, arch: Arch) -> Iterator[str]:
    """Sentences about a complete request that does not fit its checkpoint, each with what to type."""
    yield from request_warnings(spec)
    distilled = _by_lora(spec) or is_distilled(spec.checkpoint, arch.scheduler)
    if spec.recipe == ONE_STAGE and distilled:
        yield f"this model is distilled, the recipe `one_stage` is not for it: {typed('recipe', DISTILLED)}"
    if spec.recipe != DISTILLED:
        return
    if not distilled and not any(strength for _, strength in map(parse_lora, spec.lora)):
        yield f"this model is not distilled, the recipe `distilled` is not for it: {typed('recipe', ONE_STAGE)}"
        return
    unguided = " ".join(
        typed(f"guidance.{stream}.{name}", vars(NO_GUIDANCE)[name])
        for stream, scales in vars(spec.guidance).items()
        for name in ("guidance_scale", "stg_scale", "modality_scale")  # rescaling has nothing to do then
        if vars(scales)[name] != vars(NO_GUIDANCE)[name]
    )
    if unguided:
        yield f"guidance costs a distilled model time and gains it nothing; without: {unguided}"
    steps = recipe_defaults(spec, DISTILLED).num_inference_steps
    if spec.num_inference_steps != steps:
        fitting = typed("num_inference_steps", steps)
        yield f"a distilled model was made for {steps} steps, not {spec.num_inference_steps}: {fitting}"


def condition_remarks(spec: RunSpec, pictures: Sequence[Video], sound: Audio | None) -> Iterator[str]:
    """Sentences about what is seen of each picture and heard of the sound, and how they were read."""
    for picture in pictures:
        cropped = picture.cropped(spec.height, spec.width)
        if remarks := [*picture.remarks, *([cropped] if cropped else [])]:
            yield f"{picture.path}: {'; '.join(remarks)}"
    if sound and (heard := sound.heard(spec.num_frames / spec.fps)):
        yield f"{sound.path}: {heard}"


def request_warnings(spec: RunSpec) -> Iterator[str]:
    """Sentences about a request that its recipe does not make, and about LoRAs that are added as nobody means it."""
    if not spec.running.video and spec.recipe == TWO_STAGE:
        yield f"the recipe `two_stage` makes one stage, there is no picture to upsample: no {option('recipe')}"
    for loras in (spec.lora, spec.second_stage.lora or ()):
        parsed = [parse_lora(lora) for lora in loras]
        for name, strength in parsed:
            if abs(strength) > MAX_STRENGTH:
                usual = typed("lora", [f"{name}:1"])
                yield f"the strength {strength:g} of {name} is beyond what LoRAs are made for: {usual}"
        for name, number in Counter(name for name, _ in parsed).items():
            if number > 1:
                yield f"{name} is added {number} times; once is {typed('lora', [name])}"


def is_distilled(checkpoint: str, schedule: Schedule) -> bool:
    """Whether it was distilled to few steps without guidance, as its name says, else its scheduler, which then computes
    no noise levels."""
    by_name = _says_distilled(checkpoint)
    return not (schedule.use_dynamic_shifting or schedule.shift_terminal) if by_name is None else by_name


def _by_lora(spec: RunSpec) -> bool:
    """Whether a LoRA makes the model a distilled one."""
    return any(strength and _says_distilled(name) for name, strength in map(parse_lora, spec.lora))


def _says_distilled(checkpoint: str) -> bool | None:
    """What the name says, its last element first; None: nothing."""
    for element in reversed(checkpoint_names(checkpoint)):
        words = re.findall("[a-z]+", element.lower())
        for before, word in pairwise(["", *words]):
            if word == "distilled":
                return before not in NEGATIONS
        if NOT_DISTILLED & set(words):
            return False
    return None


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
        sentence = f"{spec.num_frames} frames at {spec.fps:g} a second are too short for sound"
        raise UsageError(sentence, f"more {option('num_frames')} or less {option('fps')}")
    layers = arch.transformer.num_layers
    absent_blocks = [block for block in spec.stg_blocks or () if block >= layers]
    if absent_blocks and (spec.guidance.video.stg_scale or spec.guidance.audio.stg_scale):
        without = " ".join(typed(f"guidance.{stream}.stg_scale", 0) for stream in vars(spec.guidance))
        hint = f"{typed('stg_blocks', [layers - 1])}, or {without} to do without"
        raise UsageError(f"STG block {absent_blocks[0]} does not exist: the model has blocks 0 to {layers - 1}", hint)


def _device_profile(devices: Sequence[jax.Device]) -> str:
    """The profile for these devices; raises `UsageError` where they are several of an unknown kind."""
    platform, kind = devices[0].platform, devices[0].device_kind
    if platform == "cpu" or len(devices) == 1:
        return "single"
    if platform == "gpu":
        return platform
    if (published := chip(kind)) and published.profile:
        return published.profile
    known = ", ".join(typed("sharding", name) for name in profile_names("sharding"))
    hint = f"name one: {known}, or a FILE"
    raise UsageError(f"no sharding profile is made for {len(devices)} devices of kind {kind}", hint)


def layout_warnings(sharding: ShardingPlan, heads: int, decoding: DecodePlan, room: float) -> Iterator[str]:
    """A sentence if self-attention cannot trade tokens for heads, and one if decoding needs more than `room` bytes."""
    local, parts = heads // sharding.parts("heads"), sharding.parts("tokens")
    if local % parts:
        yield (
            f"{local} attention heads do not divide by the {parts} devices that split the tokens: each of them gathers"
            " all keys and values; fewer devices along that axis, or another mesh, would not"
        )
    if (needed := decoding.frames_bytes) > room:
        yield (
            f"decoding takes about {quantity(needed)} on a device that has {quantity(max(room, 0))} for it;"
            f" fewer {option('num_frames')}, a smaller {option('height')} or {option('width')}, or more devices"
        )


def check_reference_layout(sharding: ShardingPlan, heads: int) -> None:
    """Raise `UsageError` where self-attention cannot trade tokens for heads, which references by shares need."""
    local, parts = heads // sharding.parts("heads"), sharding.parts("tokens")
    if local % parts:
        raise UsageError(
            f"{local} attention heads do not divide by the {parts} devices that split the tokens, which references with"
            " a strength or a mask of attention need",
            f"{typed('sharding', 'FILE')} with another mesh, or no {option('reference_strength')} and no mask",
        )


def untrained_warnings(
    spec: RunSpec, checkpoint: Checkpoint, stages: Sequence[Stage], prompts: Sequence[str]
) -> Iterator[str]:
    """Sentences about sizes and words that the model was not trained on, if its checkpoint lists them, else about its
    length."""
    if (trained_on := read_trained_on(checkpoint.where)) is None:
        if spec.num_frames > (longest := longest_clip(spec.fps)):
            seconds, nearest = f"{spec.num_frames / spec.fps:.1f}", typed("num_frames", longest)
            yield f"models were trained on at most {LONGEST_SECONDS} s, not on {seconds}: {nearest}"
        return
    pixels = checkpoint.arch.compression.pixels
    sizes = [(pixels * stage.geometry.width, pixels * stage.geometry.height) for stage in stages]
    for sentence, cure in clip_warnings(trained_on, sizes, spec.num_frames, spec.fps):
        yield sentence if edited(spec) is not None else f"{sentence}: {cure}"  # which an edited clip may not allow
    for prompt in prompts:
        yield from prompt_warnings(trained_on, checkpoint.tokenizer, prompt)


TRAINED_ON_FILE = "trained_on.json"
LIST_WIDTH = 80  # characters of a list of words in a warning


@dataclass(frozen=True)
class TrainedOn:
    """The clips and the captions of a training."""

    sizes: tuple[str, ...]  # WIDTHxHEIGHT
    num_frames: tuple[int, ...]
    fps: tuple[float, ...]
    next_words: Mapping[str, frozenset[str]]  # every word, and those that came next to it in any caption


def read_trained_on(folder: Path) -> TrainedOn | None:
    """The file in a checkpoint's `folder`, None without one. Raises `UsageError` where it is damaged."""
    path = folder / TRAINED_ON_FILE
    if not path.exists():
        return None
    values = read_json(path)
    try:
        next_words = {word: frozenset(following.split()) for word, following in values["next_words"].items()}
        sizes, num_frames = tuple(map(str, values["sizes"])), tuple(map(int, values["num_frames"]))
        return TrainedOn(sizes, num_frames, tuple(map(float, values["fps"])), next_words)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} does not list sizes, num_frames, fps and next_words: {error}", AGAIN) from None


def clip_warnings(
    trained_on: TrainedOn, sizes: list[tuple[int, int]], num_frames: int, fps: float
) -> Iterator[tuple[str, str]]:
    """A sentence for each way in which a clip differs from those of the training, and what to type instead; `sizes`
    (width, height) of all stages, the first one first."""
    known = (size.split("x") for size in trained_on.sizes)
    options = [f"{typed('width', width)} {typed('height', height)}" for width, height in known]
    untrained = [f"{width}x{height}" for width, height in sizes if f"{width}x{height}" not in trained_on.sizes]
    if untrained:
        stage = ", the size of the first stage" if len(sizes) > 1 else ""
        sentence = f"the model was trained at {' and '.join(trained_on.sizes)} pixels, not at {untrained[0]}{stage}"
        yield sentence, options[-1 if stage else 0]
    if num_frames not in trained_on.num_frames:
        frames = trained_on.num_frames[0]
        yield f"the model was trained on clips of {frames} frames, not of {num_frames}", typed("num_frames", frames)
    if fps not in trained_on.fps:
        rate = f"{trained_on.fps[0]:g}"
        yield f"the model was trained at {rate} frames a second, not at {fps:g}", typed("fps", rate)


def prompt_warnings(trained_on: TrainedOn, tokenizer: Path, prompt: str) -> Iterator[str]:
    """A sentence for the words of a prompt that no caption had, and one for those that none had next to each other.
    `tokenizer` is the folder of the checkpoint's own, which says where a word begins and ends."""
    reader = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    words = [word for word, _ in reader.pre_tokenizer.pre_tokenize_str(reader.normalizer.normalize_str(prompt))]
    known = trained_on.next_words
    if unknown := [word for word in words if word not in known and word.isalnum()]:
        yield f"the model does not know {_listed(unknown)}"
    if prompt.strip() and not any(word.isalnum() for word in words):
        yield "the prompt has no word that the model knows"
    pairs = [(first, second) for first, second in pairwise(words) if first in known and second in known]
    if untrained := [f"`{first} {second}`" for first, second in pairs if second not in known[first]]:
        yield f"the model was not trained on {_listed(untrained)}: the clip may show something else"


def _listed(words: list[str]) -> str:
    return shorten(", ".join(dict.fromkeys(words)), LIST_WIDTH, placeholder=" …")
