"""The recipe that a checkpoint was published with: which one it is, what it fills in, and what speaks against it."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ltx2_cli.diffusion.schedule import Schedule
from ltx2_cli.models.arch import Arch
from ltx2_cli.request.profiles import AUTO, RECIPE_KEYS, checkpoint_names, recipe_defaults, resample_sigmas
from ltx2_cli.request.spec import (
    NO_GUIDANCE,
    GuidanceSpec,
    RunSpec,
    SecondStageSpec,
    StreamGuidanceSpec,
    TemporalUpsample,
)
from ltx2_cli.weights.lora_source import parse_lora
from ltx2_cli.weights.published import CATALOG

ONE_STAGE, TWO_STAGE, DISTILLED = "one_stage", "two_stage", "distilled"
NEGATIONS = {"de", "non", "not", "un"}  # de-distilled: made to want guidance again
MAX_STRENGTH = 10  # of a LoRA; usual are 0.5 to 1.5
NOT_DISTILLED = {"dev", "undistilled"}


def apply_recipe(spec: RunSpec, arch: Arch, usual: str = ONE_STAGE) -> RunSpec:
    """`spec` with its recipe, and with the recipe's values wherever none was asked for; `usual` is that of a
    model that is not distilled."""
    usual = DISTILLED if _is_distilled(spec, arch) else usual
    recipe = usual if spec.recipe == AUTO else spec.recipe
    published = recipe_defaults(spec, recipe, arch.model_version, arch.transformer.num_layers)
    values = {key: _asked_or(vars(published)[key], vars(spec)[key]) for key in RECIPE_KEYS}
    if spec.sigmas is None and values["sigmas"] is not None:
        values["sigmas"] = resample_sigmas(values["sigmas"], values["num_inference_steps"])
    return replace(spec, recipe=recipe, **values)


def guess_second_stage(spec: RunSpec) -> SecondStageSpec:
    """The second stage as far as names tell of it, before the checkpoint is open."""
    distilled = _by_lora(spec) or _says_distilled(spec.checkpoint)
    recipe = spec.recipe if spec.recipe != AUTO else DISTILLED if distilled else ONE_STAGE
    known = [entry.model_version for entry in CATALOG if entry.name == spec.checkpoint.split("@")[0]]
    pages = recipe_defaults(spec, recipe, known[0].lower().replace("-", "") if known else None)
    second_stage: SecondStageSpec = _asked_or(pages.second_stage, spec.second_stage)
    return second_stage


def recipe_warnings(spec: RunSpec, arch: Arch) -> Iterator[str]:
    """Where a completed request speaks against its checkpoint: a sentence each that ends with what to type."""
    distilled = _is_distilled(spec, arch)
    if spec.recipe == ONE_STAGE and distilled:
        yield "this model is distilled, the recipe `one_stage` is not for it: --recipe distilled"
    if spec.recipe != DISTILLED:
        return
    if not distilled and not any(strength for _, strength in map(parse_lora, spec.lora)):
        yield "this model is not distilled, the recipe `distilled` is not for it: --recipe one_stage"
        return
    if unguided := " ".join(_switched_off(spec.guidance)):
        yield f"guidance costs a distilled model time and gains it nothing; without: {unguided}"
    steps = recipe_defaults(spec, DISTILLED).num_inference_steps
    if spec.num_inference_steps != steps:
        yield f"a distilled model was made for {steps} steps, not {spec.num_inference_steps}: --steps {steps}"


def unused_option_warnings(spec: RunSpec, arch: Arch, time: int | None) -> Iterator[str]:
    """Sentences about options of a completed request without effect. `time` is the factor by which its upsampler
    multiplies the frames; None: there is no second stage."""
    lengthened = spec.second_stage.temporal_upsample is TemporalUpsample.duration
    usual = recipe_defaults(spec, spec.recipe, arch.model_version, arch.transformer.num_layers).second_stage.upsampler
    if time is None and spec.second_stage.upsampler not in (None, usual):
        yield f"the upsampler {spec.second_stage.upsampler} is not used, there is one stage: --recipe two_stage"
    if time is None and lengthened:
        yield "temporal_upsample changes nothing, there is one stage: --recipe two_stage"
    if time == 1 and lengthened:
        yield "temporal_upsample changes nothing, the upsampler is spatial: --upsampler names another"
    for loras in (spec.lora, spec.second_stage.lora or ()):
        parsed = [parse_lora(lora) for lora in loras]
        for name, strength in parsed:
            if abs(strength) > MAX_STRENGTH:
                yield f"the strength {strength:g} of {name} is beyond what LoRAs are made for: --lora {name}:1"
        for name, number in Counter(name for name, _ in parsed).items():
            if number > 1:
                yield f"{name} is added {number} times; once is --lora {name}"


def is_distilled(checkpoint: str, schedule: Schedule) -> bool:
    """Whether it was distilled to few steps without guidance: as its name says, else as its scheduler does, which
    computes no noise levels then, since they are given."""
    by_name = _says_distilled(checkpoint)
    return not (schedule.use_dynamic_shifting or schedule.shift_terminal) if by_name is None else by_name


def _is_distilled(spec: RunSpec, arch: Arch) -> bool:
    """Whether the checkpoint is, or a LoRA makes it so."""
    return _by_lora(spec) or is_distilled(spec.checkpoint, arch.scheduler)


def _by_lora(spec: RunSpec) -> bool:
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


def _asked_or(published: Any, asked: Any) -> Any:
    """What was asked for, and where nothing was, what is `published`."""
    if isinstance(asked, GuidanceSpec | StreamGuidanceSpec | SecondStageSpec):
        return type(asked)(*map(_asked_or, vars(published).values(), vars(asked).values()))
    return published if asked is None else asked


def _switched_off(guidance: GuidanceSpec) -> Iterator[str]:
    """The options that leave one evaluation of the model in a step, as far as they are not what is asked."""
    for stream, prefix in ((guidance.video, "--"), (guidance.audio, "--audio-")):
        for name in ("guidance_scale", "stg_scale", "modality_scale"):  # the rescale of nothing is nothing
            if vars(stream)[name] != vars(NO_GUIDANCE)[name]:
                yield f"{prefix}{name.replace('_', '-')} {vars(NO_GUIDANCE)[name]:g}"
