"""Latents that are not finite: of which step, and by which part of the denoiser, found by running again."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from ltx2_cli.core import loop
from ltx2_cli.core.compiling import UNTOLD
from ltx2_cli.core.progress import Progress, phases
from ltx2_cli.core.report import Report
from ltx2_cli.hosts import fetch, place
from ltx2_cli.plan import Plan
from ltx2_cli.spec import AV, DType, NotFiniteError
from ltx2_cli.weights.load import not_finite


def check_finite(plan: Plan, now: Progress, finite: AV[jax.Array], step: int, where: str = "") -> None:
    """Raise `NotFiniteError` unless both streams are finite after `step` steps of the stage that runs `now`."""
    number, stage, _ = phases(plan)[now.phase]
    for name, good in finite._asdict().items():
        if not bool(good):
            raise NotFiniteError(
                f"the {name} latents of stage {number + 1} are not finite after step {step} of"
                f" {len(stage.sigmas) - 1}{where}",
                "lower the guidance scales, or " * (len(stage.passes) > 1) + in_float32(plan),
            )


def in_float32(plan: Plan) -> str:
    """What to type where a network overflows."""
    if plan.spec.dtype is DType.float32:
        return "other weights: these overflow even in float32"
    return "--dtype float32 has the range it needs"


def locate(plan: Plan, now: Progress, begin: Callable[[], AV[Any]], inputs: tuple[Any, ...], report: Report) -> None:
    """After steps that did not end finite, raise the `NotFiniteError` that names the first such step and what in it was
    first; as much of that as can be found.

    The batch runs `now`, from what `begin` gives, again a step at a time, by the program that ran before: an ordinary
    run keeps nothing for this, and compiles nothing.
    """
    transformer, *fixed = inputs
    _, stage, _ = phases(plan)[now.phase]
    with report.stage("find what is not finite"), suppress(*UNTOLD):
        if not_finite(transformer):  # no step is to blame
            return
        latents = place(begin(), stage.sharding.replicated)
        for step in range(now.step, len(stage.sigmas) - 1):
            before = AV(*(np.array(fetch(stream)) for stream in latents))
            bounds = np.int32(step), np.int32(step + 1)
            latents, finite = loop.denoise_steps(transformer, latents, *fixed, *bounds, stage.sharding)
            if not all(map(bool, finite)):
                check_finite(plan, now, finite, step + 1, _first_part(plan, now, before, step, inputs))


def _first_part(plan: Plan, now: Progress, before: AV[np.ndarray], step: int, inputs: tuple[Any, ...]) -> str:
    """Of a step from these latents, what is the first that is not finite, in words; nothing where it cannot be told."""
    transformer, text, contexts, ropes, switches, *_ = inputs
    _, stage, _ = phases(plan)[now.phase]
    rows, layers = (text, contexts, ropes, switches), plan.arch.transformer.num_layers
    latents, sigma = place((before, stage.sigmas[step]), stage.sharding.replicated)
    parts = (
        "the text that the denoiser reads is not finite",
        "what enters its first block is not finite",
        *(f"block {number} of {layers} is the first whose output is not" for number in range(1, layers + 1)),
        "the output of every block is finite, what the denoiser makes of it is not",
        "what the denoiser makes is finite, what guidance and the step make of it is not",
    )
    with suppress(*UNTOLD):
        finite = fetch(loop.finite_parts(transformer, latents, *rows, sigma, stage.sharding))
        return f": {parts[int(np.argmin([*finite, False]))]}"
    return ""
