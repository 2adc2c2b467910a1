"""`ltx2 bench run`: measured time of steps, compared with the estimate."""

import json
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

from ltx2_cli.artifacts.files import Output, reserve
from ltx2_cli.artifacts.outputs import Product, check_distinct
from ltx2_cli.chips import chip
from ltx2_cli.console import columns, counted_steps, print_out
from ltx2_cli.core.bench import DENOISER_STEPS, measure_steps, perf_facts
from ltx2_cli.core.programs import enable_compilation_cache
from ltx2_cli.core.provenance import input_files
from ltx2_cli.core.report import Report
from ltx2_cli.errors import UsageError
from ltx2_cli.estimate.alternatives import Request
from ltx2_cli.estimate.estimate import Estimate, estimate_plan
from ltx2_cli.estimate.fit import Typed, check_fit
from ltx2_cli.parallel.devices import find_devices
from ltx2_cli.plan.stages import EULER
from ltx2_cli.request.spec import ComputeType, Offload, RunSpec, WeightType
from ltx2_cli.request.spelling import option_name
from ltx2_cli.request.spelling import typed as spelt
from ltx2_cli.units import duration, quantity

DEFAULT_STEPS = 10  # measured steps, without --steps
Figures = dict[str, Any]


def bench(spec: RunSpec, report: Report, files: list[Output], typed: Typed, as_json: bool) -> None:
    """Measure a request, print the figures, and write them into `files`, one or none. Raises `DoesNotFitError` before
    any work, with an alternative that fits, spelt by `typed`."""
    if "num_inference_steps" not in spec.asked and spec.sigmas is None:
        spec = replace(spec, num_inference_steps=DEFAULT_STEPS)

    with reserve(files):
        enable_compilation_cache(spec.compile_cache)
        request = Request(spec, find_devices(), product=Product.latents)
        plan = request.plan()
        check_distinct(files, input_files(plan))
        if any(stage.placed_videos or stage.audio_conditions for stage in plan.stages):
            sentence = "steps are measured without what a clip is given"
            image, *more, audio = map(
                option_name, ("conditions/image", "conditions/video", "conditions/reference", "audio")
            )
            raise UsageError(sentence, f"leave out {', '.join([image, *more])} and {audio}")
        if any(len(stage.pass_counts) > 1 for stage in plan.stages):
            keys = {"guidance_interval": [0, 1], "stg_every": 1, "modality_every": 1}
            alike = " ".join(spelt(key, value) for key, value in keys.items())
            raise UsageError("steps are measured that have the same passes", alike)
        if any(stage.forwards > stage.steps for stage in plan.stages):
            raise UsageError("steps are measured that have one forward", spelt("sampler", EULER))
        if spec.first_block_cache is not None:
            sentence = "steps of random weights say nothing about what a first-block cache skips"
            raise UsageError(sentence, f"leave out {option_name('first_block_cache')}")
        plan = check_fit(request, plan, typed)
        report.flush()
        timings, seconds = measure_steps(plan, report)
        facts = perf_facts(plan, DENOISER_STEPS)
        figures = [*stage_figures(estimate_plan(plan), seconds)]
        for file, _ in files:
            timings.write(file, facts)
    if as_json:
        print_out(json.dumps({**timings.record(facts), "stages": figures}, indent=2))
    else:
        settings, environment = facts["settings"], facts["environment"]
        print_out("\n".join(columns([*figure_rows(settings, environment, figures)])))


def stage_figures(estimate: Estimate, seconds: list[list[float]]) -> Iterator[Figures]:
    """The measured seconds of each stage's steps compared with the estimate, on one device. Fractions are of the
    device's published rates, if known."""
    rates = chip(estimate.plan.sharding.mesh.devices.flat[0].device_kind)
    for stage, times in zip(estimate.stages, seconds, strict=True):
        middle = median(times)
        flops, read = stage.flops / middle, stage.weights / middle
        yield {
            "step_seconds": {"median": middle, "least": min(times), "most": max(times)},
            "least_seconds_by_estimate": stage.seconds_per_step,
            "flops": stage.flops,
            "flops_per_second": flops,
            "mfu": flops / rates.flops if rates else None,
            "weight_bytes": stage.weights,
            "weight_bytes_per_second": read,
            "share_of_bandwidth": read / rates.hbm_bandwidth if rates else None,
        }


def figure_rows(settings: Figures, environment: Figures, figures: list[Figures]) -> Iterator[tuple[str, str]]:
    """Rows for people: the figures of each stage."""
    held = "" if settings["weights"] == WeightType.auto else f", {settings['weights']} in the layers"
    held += ", multiplied in eight bits" * (settings["compute"] == ComputeType.full)
    held += f", {Offload(settings['offload']).text} in the host's memory" * (settings["offload"] != Offload.none)
    model = f"{settings['model_version']}, {settings['layers']} layers, {settings['dtype']}{held}"
    yield "model", f"{model}, random weights"
    yield "devices", environment["devices"]
    for number, stage in enumerate(figures):
        seconds, least = stage["step_seconds"], stage["least_seconds_by_estimate"]
        name = f"stage {number + 1}" if len(figures) > 1 else "clip"
        passes = f"{settings['passes'][number]} pass{'es' * (settings['passes'][number] > 1)}"
        yield name, f"{settings['sizes'][number]}, {passes}; {environment['meshes'][number]}"
        spread = f"{duration(seconds['least'])} to {duration(seconds['most'])}"
        count = counted_steps(settings["steps"][number])
        yield "  a step", f"{duration(seconds['median'])}, the median of {count}: {spread}"
        if least:
            yield "  estimate", f"{duration(least)} at least; measured: {seconds['median'] / least:.2f} times that"
        fraction = f": {stage['mfu']:.1%} of what its maker says (MFU)" if stage["mfu"] else ""
        work = f"{quantity(stage['flops'], 'FLOP')} a device, {quantity(stage['flops_per_second'], 'FLOP/s')}"
        yield "  work", work + fraction
        fraction = f": {stage['share_of_bandwidth']:.1%} of its bandwidth" if stage["share_of_bandwidth"] else ""
        read = f"{quantity(stage['weight_bytes'])} a device, {quantity(stage['weight_bytes_per_second'], 'B/s')}"
        yield "  weights", read + fraction
