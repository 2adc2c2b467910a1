"""The recipe of a checkpoint, and the values that it fills in."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import jax

from ltx2_cli.chips import chip
from ltx2_cli.diffusion.denoise import Schedule
from ltx2_cli.errors import UsageError
from ltx2_cli.models.arch import Arch
from ltx2_cli.models.networks import Checkpoint
from ltx2_cli.models.upsampler import has_upsampler
from ltx2_cli.plan.layout import device_profile
from ltx2_cli.request.profiles import AUTO, checkpoint_names, complete_spec
from ltx2_cli.request.spec import ComputeType, RunSpec
from ltx2_cli.request.spelling import option_name
from ltx2_cli.request.validation import random_seed
from ltx2_cli.weights.lora import parse_lora
from ltx2_cli.weights.published import CATALOG

ONE_STAGE, TWO_STAGE, HQ = "one_stage", "two_stage", "hq"
DISTILLED, DFR, DFR_TEMPORAL, DFR_SPATIAL = FOR_DISTILLED = "distilled", "dfr", "dfr_temporal", "dfr_spatial"
NEGATIONS = {"de", "non", "not", "un"}  # de-distilled: made to want guidance again
NOT_DISTILLED = {"dev", "undistilled"}


def complete_request(
    spec: RunSpec, checkpoint: Checkpoint, devices: Sequence[jax.Device], from_latents: bool
) -> RunSpec:
    """Complete `spec`: values of its recipe, of the devices' sharding profile and kind, and a seed. An upsampler in the
    checkpoint's folder takes precedence over the recipe's. Raises `UsageError` for keyframes of another model than
    LTX-2.5."""
    own = spec.second_stage.upsampler is None and has_upsampler(checkpoint.where)
    seed = spec.seed if spec.seed is not None else (random_seed(spec),)
    sharding = device_profile(devices) if spec.sharding.profile == AUTO else AUTO
    if spec.compute is ComputeType.auto:
        spec = replace(spec, compute=faster_compute(spec, checkpoint, devices[0]))
    spec = apply_recipe(replace(spec, seed=seed), checkpoint.arch, TWO_STAGE if from_latents else ONE_STAGE, sharding)
    _check_keyframes(spec, checkpoint.arch)
    own = own and not spec.second_stage.keyframe_windows  # for which a folder's, a spatial one, is of no use
    second = replace(spec.second_stage, upsampler=None) if own else spec.second_stage
    return replace(spec, second_stage=second if spec.running.video else replace(second, sigmas=(), lora=()))


def _check_keyframes(spec: RunSpec, arch: Arch) -> None:
    """Raise `UsageError` for generated keyframes of a model that was not trained for any."""
    by_recipe = spec.keyframe_segments or (spec.second_stage.keyframe_windows and spec.second_stage.sigmas)
    asked = bool(spec.keyframes or by_recipe) and spec.running.video
    if asked and not arch.transformer.use_keyframes_abs_pos_embedding:
        sentence = f"LTX-2.5 alone generates keyframes, and the model is {arch.model_version}"
        raise UsageError(sentence, f"leave out {option_name('recipe' if by_recipe else 'keyframes')}")


def faster_compute(spec: RunSpec, checkpoint: Checkpoint, device: jax.Device) -> ComputeType:
    """The faster type of products with the denoiser's matrices, by the chip's published rates."""
    kind, known = checkpoint.matrices(spec).transformer, chip(device.device_kind)
    faster = kind and known and known.rate(kind.name) > known.flops
    return ComputeType.full if faster else ComputeType.weights


def apply_recipe(spec: RunSpec, arch: Arch, usual: str = ONE_STAGE, sharding: str = AUTO) -> RunSpec:
    """`spec` with its recipe, and the recipe's values for those not asked for. `usual`: the recipe if not distilled."""
    usual = DISTILLED if makes_few_steps(spec, arch) else usual
    recipe = usual if spec.recipe == AUTO else spec.recipe
    return _with_sigmas(spec, complete_spec(spec, recipe, sharding, arch.model_version, arch.transformer.num_layers))


def guess_request(spec: RunSpec, from_latents: bool = False) -> RunSpec:
    """`spec` with the recipe that the names of its files imply, before the checkpoint is open."""
    named = says_distilled(spec.transformer or "", spec.checkpoint)
    distilled = by_lora(spec) or (published_as_distilled(spec.checkpoint) if named is None else named)
    usual = DISTILLED if distilled else TWO_STAGE if from_latents else ONE_STAGE
    recipe = usual if spec.recipe == AUTO else spec.recipe
    return _with_sigmas(spec, complete_spec(spec, recipe, AUTO, guess_model_version(spec)))


def guess_model_version(spec: RunSpec) -> str | None:
    """The model version of a published checkpoint."""
    versions = [entry.model_version for entry in CATALOG if entry.name == spec.checkpoint.split("@")[0]]
    return versions[0].lower().replace("-", "") if versions else None


def _with_sigmas(spec: RunSpec, complete: RunSpec) -> RunSpec:
    """`complete` with the recipe's noise levels resampled to its number of steps, unless `spec` has noise levels."""
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


def is_distilled(checkpoint: str, schedule: Schedule) -> bool:
    """Whether a checkpoint is distilled to few steps without guidance: by its name, else by a scheduler that computes
    no noise levels."""
    by_name = says_distilled(checkpoint)
    computes = schedule.use_dynamic_shifting or schedule.shift_terminal
    return (published_as_distilled(checkpoint) or not computes) if by_name is None else by_name


def published_as_distilled(checkpoint: str) -> bool:
    """Whether it is a published checkpoint with a distilled denoiser."""
    return any(entry.recipe == DISTILLED for entry in CATALOG if entry.name == checkpoint.partition("@")[0])


def makes_few_steps(spec: RunSpec, arch: Arch) -> bool:
    """Whether the denoiser of the request is distilled, by its LoRAs, the name of its file, or its checkpoint."""
    by_file = says_distilled(spec.transformer) if spec.transformer else None
    return by_lora(spec) or (is_distilled(spec.checkpoint, arch.scheduler) if by_file is None else by_file)


def by_lora(spec: RunSpec) -> bool:
    """Whether a LoRA of the request distils the model: at half its strength or more. The recipe `hq` has a quarter."""
    return any(strength >= 0.5 and says_distilled(name) for name, strength in map(parse_lora, spec.lora))


def says_distilled(*names: str) -> bool | None:
    """Whether one of the names says distilled or the opposite; None: neither. The first name that does counts, and of a
    path its last element."""
    for element in (element for name in names for element in reversed(checkpoint_names(name))):
        words = re.findall("[a-z]+", element.lower())
        for before, word in pairwise(["", *words]):
            if word == "distilled":
                return before not in NEGATIONS
        if NOT_DISTILLED & set(words):
            return False
    return None
