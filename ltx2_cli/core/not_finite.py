"""The first step, and the first part of the denoiser, whose output is not finite: found by running the steps again."""

from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.core.advice import in_float32
from ltx2_cli.core.programs import UNDIAGNOSABLE
from ltx2_cli.core.report import Report
from ltx2_cli.core.stage_programs import StageRun, in_its_dtype, of_tile
from ltx2_cli.errors import NotFiniteError
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.models.transformer_inputs import (
    DenoiserInputs,
)
from ltx2_cli.parallel.arrays import to_host
from ltx2_cli.parallel.jit import jitted
from ltx2_cli.plan.phases import Phase, phase_name
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stage_tiles import Tile
from ltx2_cli.request.spec import Streams
from ltx2_cli.weights.load import not_finite


def _finite_parts(
    transformer: Transformer,
    latents: Streams[jax.Array],
    inputs: DenoiserInputs,
    sigma: jax.Array,
    tile: Tile | None = None,
) -> jax.Array:
    """Whether parts of a forward are finite, bool [layers + 3]: text, the first layer's input, each output, the
    velocities. Of a `tile`: its latents alone."""
    if tile:
        latents, inputs = of_tile(tile, latents, inputs)

    def finite(x: Streams[jax.Array]) -> jax.Array:  # without the tokens that fill up the devices
        own = [stream[:, : tokens.shape[1]] for stream, tokens in zip(x, latents, strict=True)]
        return jnp.isfinite(own[0]).all() & jnp.isfinite(own[1]).all()

    inputs_of_layers = (in_its_dtype(transformer, latents), sigma, inputs)
    velocities, (before, after) = transformer.forward_with_intermediates(*inputs_of_layers, finite)
    text = jnp.isfinite(inputs.text.tokens.video).all() & jnp.isfinite(inputs.text.tokens.audio).all()
    return jnp.hstack((text, before, after, finite(velocities)))


def check_stage(plan: Plan, phase: Phase, finite: Streams[jax.Array], step: int, where: str = "") -> None:
    """Raise `NotFiniteError` unless both streams are finite after `step` steps of a stage."""
    for name, is_finite in finite._asdict().items():
        if not bool(is_finite):
            after = f"are not finite after step {step} of {phase.stage.steps}{where}"
            lower = "lower the guidance scales, or " if len(phase.stage.passes) > 1 else ""
            raise NotFiniteError(f"the {name} latents of {phase_name(phase)} {after}", lower + in_float32(plan))


def locate_not_finite(run: StageRun, batch: int, start: int, latents: Streams[Any], report: Report) -> None:
    """Raise the `NotFiniteError` that names the first step of a batch from `start` whose latents are not finite, and
    the first such part in it, as far as that can be found. The steps run again one at a time, by the same program: an
    ordinary run keeps and compiles nothing for this."""
    with report.activity("find what is not finite"), suppress(*UNDIAGNOSABLE):
        if not_finite(run.transformer):  # no step is to blame
            return
        latents = run.place(latents)
        run.forget(latents)
        for step in range(start, run.phase.stage.steps):
            before = Streams(*(np.array(to_host(stream)) for stream in latents))
            latents, finite = run.denoise(latents, batch, step, step + 1)
            if not all(map(bool, finite)):
                check_stage(run.plan, run.phase, finite, step + 1, _first_part(run, before, step))


def _first_part(run: StageRun, before: Streams[np.ndarray], step: int) -> str:
    """The first part of a step from these latents that is not finite, in words; empty if unknown."""
    layers, sharding = run.plan.arch.transformer.num_layers, run.phase.stage.sharding
    latents, sigma = run.place((before, run.phase.stage.sigmas[step]))
    parts = (
        "the text that the denoiser reads is not finite",
        "the input of its first block is not finite",
        *(f"block {block} of {layers} is the first whose output is not" for block in range(1, layers + 1)),
        "the output of every block is finite, that of the denoiser is not",
        "the output of the denoiser is finite, that of guidance and the step is not",
    )
    with suppress(*UNDIAGNOSABLE):
        tiles = run.phase.stage.tiles
        forwards = [{"tile": tile} for tile in tiles.tiles()] if tiles else [{}]
        parts_of = [jitted(_finite_parts, sharding.replicated, sharding, **tile) for tile in forwards]  # compiled here
        finite = np.all([to_host(each(run.transformer, latents, run.inputs, sigma)) for each in parts_of], axis=0)
        return f": {parts[int(np.argmin([*finite, False]))]}"
    return ""
