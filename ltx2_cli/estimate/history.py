"""How long a run takes, by the earlier runs of its shape on this machine, else by the plan alone.

Of a shape the user's cache holds one small file with the last runs. A run counts as four times: a step of each stage, a
clip that is decoded and written, waiting for compilers, and all else (imports, loading, text). So a run of other seeds
or with another number of steps is of the same shape.
"""

import hashlib
import json
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

import jax

from ltx2_cli.core.report import DECODE, DENOISE, WRITE, Timings
from ltx2_cli.errors import RunError
from ltx2_cli.estimate.estimate import estimate_plan
from ltx2_cli.files import replacing
from ltx2_cli.outputs import Product
from ltx2_cli.plan.edit import pieces
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import Stage
from ltx2_cli.request.profiles import user_cache
from ltx2_cli.request.spec import NO_CACHE
from ltx2_cli.units import duration

KEPT = 5  # runs of a shape, the last ones
READING = 0.06  # of the time to compile programs, that reading them takes; as measured on a CPU


@dataclass(frozen=True)
class PastRun:
    """One run, in seconds."""

    steps: tuple[float, ...]  # of each stage: a step
    clip: float  # to decode and write one, or a piece of one that goes on
    compiling: float  # waiting for programs to be compiled, or read from the cache
    cold: bool  # some were compiled
    others: float  # from the program's start

    def seconds(self, plan: Plan, compiling: float) -> float:
        """What a run of `plan` takes at these times."""
        steps = sum(stage.steps * step for stage, step in zip(_stages(plan), self.steps, strict=True))
        return self.others + compiling + pieces(plan.spec) * (len(plan.batches) * steps + len(plan.seeds) * self.clip)


def expected_time(plan: Plan, product: Product) -> str:
    """How long a run will take, and how that is known: by the median of the last runs of this shape, or least by the
    plan."""
    if runs := past_runs(plan, product):
        seconds = median(run.seconds(plan, _compiling(runs, plan)) for run in runs)
        number = "the last run" if len(runs) == 1 else f"the last {len(runs)} runs"
        return f"about {in_words(seconds)}, as {number} of this shape here"
    if least := sum(estimate_plan(plan).phase_seconds.values()):
        return f"a guess: at least {in_words(least)} without loading and compiling; none of this shape was made here"
    return "not known: none of this shape was made here"


def _compiling(runs: Sequence[PastRun], plan: Plan) -> float:
    """Seconds of waiting for programs. What an earlier run compiled is read from the cache, unless there is none."""
    settings: Any = jax.config
    cached = settings.jax_enable_compilation_cache and plan.compile_cache != NO_CACHE
    alike = [run.compiling for run in runs if run.cold is not cached]
    return median(alike) if alike else median(run.compiling for run in runs) * (READING if cached else 1)


def remember(plan: Plan, product: Product, timings: Timings, total: float, cold: bool) -> None:
    """Keep the times of a run that began with noise and is whole: `total` seconds since the program's start, `cold` if
    a program was compiled. What cannot be kept is not."""
    stages, found = _stages(plan), timings.seconds()
    denoising = [seconds for name, seconds in timings.stages if name == DENOISE]
    each, batches = pieces(plan.spec), len(denoising) // len(stages) if stages else 0
    if not batches or batches != each * len(plan.batches) or len(denoising) != batches * len(stages):
        return
    steps = tuple(sum(denoising[number :: len(stages)]) / batches / stage.steps for number, stage in enumerate(stages))
    clips = found.get(DECODE, 0.0) + found.get(WRITE, 0.0)
    compiling = sum(seconds for name, seconds in found.items() if name.startswith("compile"))
    others = total - sum(denoising) - clips - compiling
    run = PastRun(steps, clips / len(plan.seeds) / each, compiling, cold, others)
    runs = [*past_runs(plan, product), run][-KEPT:]
    path = _file(shape := shape_of(plan, product))
    text = json.dumps({"shape": shape, "runs": [asdict(run) for run in runs]}, indent=1) + "\n"
    with suppress(RunError), replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def past_runs(plan: Plan, product: Product) -> list[PastRun]:
    """The runs of this shape that are known, the last one last; none where the file is missing or damaged."""
    shape, count = shape_of(plan, product), len(_stages(plan))
    try:
        values = json.loads(_file(shape).read_text(encoding="utf-8"))
        runs = [PastRun(**{**run, "steps": tuple(map(float, run["steps"]))}) for run in values["runs"]]
        times = [[*run.steps, run.clip, run.compiling, run.others] for run in runs]
        whole = all(len(seconds) == count + 3 and all(map(isfinite, seconds)) for seconds in times)
        return runs if whole and values["shape"] == shape else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def shape_of(plan: Plan, product: Product) -> dict[str, Any]:
    """What decides how long a run takes, but for its numbers of steps and clips."""
    devices = list(plan.sharding.mesh.devices.flat)
    return {
        "machine": platform.node(),
        "devices": f"{len(devices)} {devices[0].device_kind}",
        "model": plan.spec.checkpoint,
        "lora": [*plan.spec.lora, *(plan.spec.second_stage.lora or ())],
        "dtype": plan.dtype.value,
        "product": product.value,
        "videos": plan.batch_size,
        "stages": [_shape_of_stage(stage) for stage in plan.stages],
    }


def _shape_of_stage(stage: Stage) -> list[Any]:
    passes = [guidance_pass.name for guidance_pass in stage.passes]
    mesh = f"{stage.sharding.text}, {stage.sharding.attention}"
    return [[list(shape) for shape in (*stage.shapes, *stage.token_shapes)], passes, mesh]


def _stages(plan: Plan) -> Sequence[Stage]:
    """The stages that denoise."""
    return [stage for stage in plan.stages if stage.steps]


def _file(shape: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:16]
    return user_cache() / "timings" / f"{name}.json"


def in_words(seconds: float) -> str:
    """`12 s`, `12 min`, `1.5 h`."""
    if seconds < 10:
        return duration(seconds)
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3 * 3600 else f"{seconds / 3600:.1f} h"
