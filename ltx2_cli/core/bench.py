"""Time of a clip's steps on the local devices, without its weights: random numbers take as long. And facts of a run for
a dump of timings."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.core.components import Components, abstract_network
from ltx2_cli.core.encode import abstract_contexts
from ltx2_cli.core.provenance import devices, versions
from ltx2_cli.core.report import Report, Timings
from ltx2_cli.core.run import run_phases
from ltx2_cli.core.state import RunState
from ltx2_cli.diffusion.latents import token_shapes
from ltx2_cli.models.networks import DENOISER
from ltx2_cli.parallel.jit import jitted_once
from ltx2_cli.plan.phases import Denoise
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import Stage
from ltx2_cli.request.spec import Streams
from ltx2_cli.weights.declare import Weight, map_weights
from ltx2_cli.weights.quantized_matrix import Matrix, QuantizedMatrix, quantize
from ltx2_cli.weights.tensors import MatrixType

DENOISER_STEPS = "steps of the denoiser, random weights"
WARM_RUN = "a run, weights loaded"
WEIGHT_SCALE = 0.03  # of random weights
TURNS = (12.9898, 78.233, 37.719, 4.5813, 93.989)  # radians between two neighbours along each axis


def perf_facts(plan: Plan, measured: str) -> dict[str, Any]:
    """Facts for a dump of timings: `settings`, which must be equal for equal work, and the `environment`, which may
    differ between compared dumps. `measured` is `DENOISER_STEPS` or `CLIP`."""
    stages = plan.stages
    settings = {
        "measured": measured,
        "model_version": plan.arch.model_version,
        "layers": plan.arch.transformer.num_layers,
        "dtype": plan.dtype.value,
        "weights": plan.spec.weights.value,
        "compute": plan.spec.compute.value,
        "offload": plan.spec.offload.value,
        "videos": f"{len(plan.batches)} x {plan.batch_size}",
        "sizes": [_size(plan, stage) for stage in stages],
        "passes": [len(stage.passes) for stage in stages],
        "steps": [stage.steps for stage in stages],
        "text_tokens": plan.text_tokens,
    }
    meshes = [f"{stage.sharding.text}, {stage.sharding.attention.value} attention" for stage in stages]
    return {"settings": settings, "environment": {**versions(), "devices": devices(), "meshes": meshes}}


def _size(plan: Plan, stage: Stage) -> str:
    whole, part, windows = stage.geometry, stage.largest_window.geometry, len(stage.windows)
    frames, height, width = plan.arch.compression.clip_size(whole.frames, whole.height, whole.width)
    tokens = f"{part.video_tokens} + {part.audio_frames} tokens" + f" in each of {windows} windows" * (windows > 1)
    tokens += f", {stage.tiles.text}" if stage.tiles else ""
    return f"{width}x{height}, {frames} frames, {tokens}"


def measure_steps(plan: Plan, report: Report) -> tuple[Timings, list[list[float]]]:
    """The timings of the steps of all stages, and the seconds of each step by stage, without compilation. A refining
    stage begins from random latents: their upsampling is left out."""
    components = Components(plan)
    with report.activity("draw weights"):
        network = jax.block_until_ready(random_network(abstract_network(plan, DENOISER)))
    components.resident |= dict.fromkeys((stage.network for stage in plan.stages), network)
    components.keep(components.resident)
    contexts = jax.tree.map(_normal, abstract_contexts(plan))
    one_step = replace(plan, stages=tuple(replace(stage, sigmas=stage.sigmas[[0, -1]]) for stage in plan.stages))
    for stage in plan.stages:
        with report.activity(f"compile {stage.name}"):
            _run_stage(one_step, stage.name, components, contexts, Report())
    timings, seconds = Timings(report), list[list[float]]()
    for stage in plan.stages:
        before = len(timings.denoise_steps)
        _run_stage(plan, stage.name, components, contexts, timings)
        seconds.append(timings.denoise_steps[before:])
    return timings, seconds


def _run_stage(plan: Plan, name: str, components: Components, contexts: Streams[Any], report: Report) -> None:
    """The steps of one stage. The plan ends with it."""
    phases = [phase for phase in plan.phases if isinstance(phase, Denoise) and phase.clip.name == name]
    until = replace(plan, stages=plan.stages[: phases[0].number + 1])
    stage, place = phases[0].clip, plan.phases.index(phases[0])
    latents = Streams(*map(_random_tokens, token_shapes(len(plan.seeds), stage.shapes))) if stage.source else None
    texts = dict.fromkeys((stage.connectors for stage in plan.stages), contexts)
    behind = stage.geometry.video_tokens - stage.geometry.grid_tokens
    begun = _random_tokens((len(plan.seeds), behind, stage.token_shapes.video[1])) if stage.begins_behind else None
    start = RunState(phase=place, latents=latents, contexts=texts, behind=begun)
    for _ in run_phases(until, start, components, report):
        pass


def _random_tokens(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def _normal(x: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(jax.random.normal(jax.random.key(0), x.shape, x.dtype), x.sharding)


def random_network(network: nnx.Module) -> nnx.Module:
    """An abstract network with weights that look random, each part made on its own device."""

    def filled(weight: Weight) -> Weight:
        value = weight.get_value()
        where = jax.tree.map(lambda array: array.sharding, value)
        kind = value.type if isinstance(value, QuantizedMatrix) else None
        return weight.with_value(_numbers(value.shape, value.dtype, kind, where)())

    return map_weights(filled, network)


@cache
def _numbers(shape: tuple[int, ...], dtype: np.dtype, kind: MatrixType | None, where: Any) -> Any:
    """A program that makes an array of numbers up to `WEIGHT_SCALE`: sines, since every device can make its own."""

    def make() -> Matrix:
        angles = sum(
            turn * jax.lax.broadcasted_iota(np.float32, shape, axis) for axis, turn in enumerate(TURNS[: len(shape)])
        )
        numbers = WEIGHT_SCALE * jnp.sin(angles)
        return quantize(numbers, kind) if kind else numbers.astype(dtype)

    return jitted_once(make, where)
