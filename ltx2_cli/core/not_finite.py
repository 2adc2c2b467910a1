"""Latents that are not finite: of which step, and by which part of the denoiser, found by running again."""

from contextlib import suppress
from typing import Any

import jax
import numpy as np

from ltx2_cli.core.compiling import UNDIAGNOSABLE
from ltx2_cli.core.denoising import StageRun, finite_program
from ltx2_cli.core.report import Report
from ltx2_cli.distributed import to_host
from ltx2_cli.errors import NotFiniteError
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import Denoise
from ltx2_cli.request.spec import DType, Streams
from ltx2_cli.weights.load import not_finite


def check_finite(plan: Plan, phase: Denoise, finite: Streams[jax.Array], step: int, where: str = "") -> None:
    """Raise `NotFiniteError` unless both streams are finite after `step` steps of a stage."""
    for name, good in finite._asdict().items():
        if not bool(good):
            lower = "lower the guidance scales, or " if len(phase.stage.passes) > 1 else ""
            raise NotFiniteError(
                f"the {name} latents of stage {phase.number + 1} are not finite after step {step} of"
                f" {phase.stage.steps}{where}",
                lower + in_float32(plan),
            )


def in_float32(plan: Plan) -> str:
    """What to type where a network overflows."""
    if plan.dtype is DType.float32:
        return "other weights: these overflow even in float32"
    return "--dtype float32 has the range it needs"


def locate(run: StageRun, start: int, latents: Streams[Any], report: Report) -> None:
    """After steps that did not end finite, raise the `NotFiniteError` that names the first such step and what in it was
    first; as much of that as can be found.

    The steps from `start` run again on the latents that they began with, one at a time, by the program that ran before:
    an ordinary run keeps nothing for this, and compiles nothing.
    """
    with report.stage("find what is not finite"), suppress(*UNDIAGNOSABLE):
        if not_finite(run.transformer):  # no step is to blame
            return
        latents = run.place(latents)
        for step in range(start, run.phase.stage.steps):
            before = Streams(*(np.array(to_host(stream)) for stream in latents))
            latents, finite = run.denoise(latents, step, step + 1)
            if not all(map(bool, finite)):
                check_finite(run.plan, run.phase, finite, step + 1, _first_part(run, before, step))


def _first_part(run: StageRun, before: Streams[np.ndarray], step: int) -> str:
    """Of a step from these latents, what is the first that is not finite, in words; nothing where it cannot be told."""
    layers = run.plan.arch.transformer.num_layers
    latents, sigma = run.place((before, run.phase.stage.sigmas[step]))
    parts = (
        "the text that the denoiser reads is not finite",
        "what enters its first block is not finite",
        *(f"block {number} of {layers} is the first whose output is not" for number in range(1, layers + 1)),
        "the output of every block is finite, what the denoiser makes of it is not",
        "what the denoiser makes is finite, what guidance and the step make of it is not",
    )
    with suppress(*UNDIAGNOSABLE):
        finite = to_host(finite_program(run.plan, run.phase.number)(run.transformer, latents, run.inputs, sigma))
        return f": {parts[int(np.argmin([*finite, False]))]}"
    return ""
