"""Expected time of a run, from earlier runs of its shape on the same kind of devices, else from the plan.

The user's cache holds a small file for each shape, with the last runs. A run is stored as five times: a step of each
stage, decoding and writing a clip, reading the inputs of a request, waiting for compilers, and the rest (imports,
loading). So a run with other seeds or another number of steps has the same shape, and a batch is many runs that wait
and load once.
"""

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

import jax

from ltx2_cli.artifacts.files import replacing
from ltx2_cli.artifacts.outputs import Product
from ltx2_cli.core.report import COMPILE, DECODE, DENOISE, WRITE, Timings
from ltx2_cli.errors import RunError
from ltx2_cli.estimate.estimate import estimate_plan
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import EULER, Stage
from ltx2_cli.request.profiles import user_cache
from ltx2_cli.request.spec import NO_CACHE
from ltx2_cli.units import duration

KEPT = 5  # last runs of a shape
SHAPES = 200  # most recent shapes whose runs are kept
READING = 0.06  # time to read programs from the cache, as a fraction of compiling them; measured on a CPU


@dataclass(frozen=True)
class PastRun:
    """One run, in seconds."""

    steps: tuple[float, ...]  # of one step of each stage
    clip: float  # to decode and write one clip
    reading: float  # to read the text, images, videos and audio of a request
    compiling: float  # waiting for programs to be compiled, or read from the cache
    cold: bool  # some were compiled
    others: float  # from the program's start

    def work(self, plan: Plan) -> float:
        """Seconds to make the clips of `plan` at these times, with all networks and programs loaded."""
        steps = sum(_steps(stage) * step for stage, step in zip(_stages(plan), self.steps, strict=True))
        clips = len(plan.batches) * steps + len(plan.seeds) * self.clip
        return self.reading + clips


def expected_time(plan: Plan, product: Product) -> str:
    """The expected time of a run, and its source."""
    return expected_times([(plan, 1)], product)


def expected_times(jobs: Sequence[tuple[Plan, int]], product: Product) -> str:
    """The expected time of numbers of runs of each plan, one after the other in one process: from the median of the
    last runs of their shapes, or from the plans."""
    known = [(plan, number, runs) for plan, number in jobs if (runs := past_runs(plan, product))]
    if jobs and len(known) == len(jobs):
        shapes = {_file(shape_of(plan, product)): len(runs) for plan, _, runs in known}
        last = f"the last {sum(shapes.values())} runs" if sum(shapes.values()) > 1 else "the last run"
        these = "these shapes" if len(shapes) > 1 else "this shape"
        return f"about {format_seconds(_seconds(known, product))}, as {last} of {these} here"
    unknown = [(plan, number) for plan, number in jobs if not past_runs(plan, product)]
    where = "first run of this shape here"
    if several := sum(number for _, number in jobs) > 1:
        where = f"{sum(number for _, number in unknown)} jobs have shapes that never ran here"
    estimates = [(estimate_plan(plan).expected_seconds, number) for plan, number in unknown]
    if not any(expected for expected, _ in estimates):
        return f"unknown: {where}" if not known else f"at least {format_seconds(_seconds(known, product))}; {where}"
    before = _seconds(known, product)
    low, high = (
        format_seconds(before + sum(number * expected[end] for expected, number in estimates if expected))
        for end in (0, 1)
    )
    without = "" if several and known else ", without loading and compiling"
    return f"{low} to {high} by estimate, not measured on hardware{without}; {where}"


def _seconds(known: Sequence[tuple[Plan, int, Sequence[PastRun]]], product: Product) -> float:
    """Seconds of numbers of runs of each plan, from the median of earlier runs of their shapes. Each shape waits for
    compilers once, and the process starts once."""
    seconds, once, others = 0.0, dict[Path, float](), [0.0]
    for plan, number, runs in known:
        seconds += number * median(run.work(plan) for run in runs)
        once[_file(shape_of(plan, product))] = _compiling(runs, plan)
        others.append(median(run.others for run in runs))
    return seconds + sum(once.values()) + max(others)


def _compiling(runs: Sequence[PastRun], plan: Plan) -> float:
    """Seconds of waiting for programs. Programs of an earlier run are read from the cache, if there is one."""
    settings: Any = jax.config
    cached = settings.jax_enable_compilation_cache and plan.compile_cache != NO_CACHE
    alike = [run.compiling for run in runs if run.cold is not cached]
    return median(alike) if alike else median(run.compiling for run in runs) * (READING if cached else 1)


def remember(plan: Plan, product: Product, timings: Timings, total: float, cold: bool) -> None:
    """Save the times of a complete run from noise: `total` seconds since the program's start, `cold` if a program was
    compiled. Failures to save are ignored."""
    stages = _stages(plan)
    denoising = _denoising(plan, timings)
    if not stages or denoising is None:
        return
    steps = tuple(seconds / len(plan.batches) / _steps(stage) for seconds, stage in zip(denoising, stages, strict=True))
    clips = sum(seconds for name, seconds in timings.activities if name in (DECODE, WRITE))
    worked = sum(seconds for _, seconds in timings.activities)
    compiling = sum(seconds for name, seconds in timings.preparations if name.startswith(COMPILE))
    reading, others = worked - sum(denoising) - clips, total - worked - compiling
    run = PastRun(steps, clips / len(plan.seeds), reading, compiling, cold, others)
    runs = [*past_runs(plan, product), run][-KEPT:]
    path = _file(shape := shape_of(plan, product))
    text = json.dumps({"shape": shape, "runs": [asdict(run) for run in runs]}, indent=1) + "\n"
    with suppress(RunError), replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    with suppress(OSError):  # another process may remove the same one
        for old in sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)[:-SHAPES]:
            old.unlink()


def _denoising(plan: Plan, timings: Timings) -> list[float] | None:
    """The seconds of each denoising stage; None if the run is not complete. A window has one entry for all batches; the
    last one may have one for each."""
    found = [seconds for name, seconds in timings.activities if name == DENOISE]
    ends = [0, *accumulate(len(stage.windows) for stage in _stages(plan))]
    whole = len(found) - ends[-1] + 1 in (1, len(plan.batches))
    ends[-1] = len(found)
    return [sum(found[begin:end]) for begin, end in pairwise(ends)] if whole else None


def past_runs(plan: Plan, product: Product) -> list[PastRun]:
    """The known runs of this shape, oldest first; none if the file is missing or damaged."""
    shape, count = shape_of(plan, product), len(_stages(plan))
    try:
        values = json.loads(_file(shape).read_text(encoding="utf-8"))
        runs = [PastRun(**{**run, "steps": tuple(map(float, run["steps"]))}) for run in values["runs"]]
        times = [[*run.steps, run.clip, run.reading, run.compiling, run.others] for run in runs]
        whole = all(len(seconds) == count + 4 and all(map(isfinite, seconds)) for seconds in times)
        return runs if whole and values["shape"] == shape else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def shape_of(plan: Plan, product: Product) -> dict[str, Any]:
    """The values that decide the time of a run, except its numbers of steps and clips."""
    devices = list(plan.sharding.mesh.devices.flat)
    kind = f"{platform.machine()}, {os.cpu_count()} cores" if devices[0].platform == "cpu" else devices[0].device_kind
    return {
        "devices": f"{len(devices)} {kind}",
        "model": plan.spec.checkpoint,
        "lora": [*plan.spec.lora, *(plan.spec.second_stage.lora or ())],
        "dtypes": [plan.dtype.value, plan.spec.text_encoder_dtype.value],
        "decoder": plan.spec.decoder.value,
        "scan_layers": plan.spec.scan_layers,
        "weights": plan.spec.weights.value,
        "compute": plan.spec.compute.value,
        "offload": plan.spec.offload.value,
        "product": product.value,
        "given": [condition.kind for condition in plan.spec.conditions] + ["audio"] * (plan.spec.audio is not None),
        "texts": [1 + len(plan.spec.segments), plan.spec.nag_scale is not None],
        "videos": plan.batch_size,
        "stages": [_shape_of_stage(stage) for stage in plan.stages],
    }


def _shape_of_stage(stage: Stage) -> list[Any]:
    passes: list[Any] = [guidance_pass.name for guidance_pass in stage.passes]
    if len(stage.pass_counts) > 1:
        passes = [[*(each.name for each in own), count] for own, count in stage.pass_counts.items()]
    windows = [len(stage.windows)] * (len(stage.windows) > 1)
    mesh = f"{stage.sharding.text}, {stage.sharding.attention}" + f", {stage.sampler}" * (stage.sampler != EULER)
    mesh += "" if stage.first_block_cache is None else f", first-block cache {stage.first_block_cache:g}"
    mesh += f", {stage.tiles.text}" if stage.tiles else ""
    return [[list(shape) for shape in (*stage.shapes, *stage.token_shapes)], passes, mesh, *windows]


def _steps(stage: Stage) -> int:
    """The steps in all windows."""
    return stage.steps * len(stage.windows)


def _stages(plan: Plan) -> Sequence[Stage]:
    """The denoising stages."""
    return [stage for stage in plan.stages if stage.steps]


def _file(shape: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:16]
    return user_cache() / "timings" / f"{name}.json"


def format_seconds(seconds: float) -> str:
    """`12 s`, `12 min`, `1.5 h`."""
    if seconds < 10:
        return duration(seconds)
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3 * 3600 else f"{seconds / 3600:.1f} h"
