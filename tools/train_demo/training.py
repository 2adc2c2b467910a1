"""One loop for every network: Muon (arXiv:2502.16982) with warm-up and a cosine's fall, averaged weights, a state that
is kept on disk."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, muon

from ltx2_cli.artifacts.files import replacing
from ltx2_cli.weights.declare import PLAIN, M, Weight, map_weights, weights
from tools.train_demo.convolution import gradients_by_products

# XLA for the CPU leaves products, convolutions and sums to a library; its own code is mostly faster but for products.
OPTIONS = {"cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}}
Draw = Callable[[np.random.Generator], Any]  # a batch


@dataclass(frozen=True)
class Course:
    """How long one network is trained, and how fast it moves."""

    name: str
    steps: int
    rate: float
    warm_up: int = 200
    average: float = 0.999
    keep_every: int = 100
    seed: int = 0
    own_code: bool = True  # XLA's, for all but products, on a CPU


@dataclass(frozen=True)
class Training:
    """What a course has come to: weights and their running average, as lists; the optimiser's state; the step."""

    weights: list[jax.Array]
    averaged: list[jax.Array]
    optimiser: Any
    step: int


def train(
    course: Course, network: M, loss: Callable[[M, Any, jax.Array], tuple[jax.Array, Any]], draw: Draw, out: Path
) -> M:
    """`network` trained on batches that `draw` makes, each of a generator that its step seeds.

    `loss(network, batch, key)` gives the loss and a dictionary of figures for the log, `NAME.jsonl` in `out`. What
    another call left in `out` is gone on from: a course that ended is only read. Returns the averaged weights.
    """
    out.mkdir(parents=True, exist_ok=True)
    schedule = optax.warmup_cosine_decay_schedule(0.0, course.rate, course.warm_up, course.steps, course.rate / 50)
    matrices = [matrix(weight) for weight in weights(network)]
    optimiser = optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(schedule, adam_b2=0.99, consistent_rms=0.2, muon_weight_dimension_numbers=matrices),
    )
    begin = [jnp.array(np.asarray(weight.get_value())) for weight in weights(network)]  # not committed to a mesh
    state = restored(Training(begin, begin, optimiser.init(begin), 0), out / f"{course.name}.npz")

    def step(values: Any, averaged: Any, moments: Any, batch: Any, number: jax.Array) -> Any:
        key = jax.random.fold_in(jax.random.key(course.seed), number)
        wanted = jax.value_and_grad(lambda values: loss(filled(network, values), batch, key), has_aux=True)
        (total, figures), gradients = wanted(values)
        updates, moments = optimiser.update(gradients, moments, values)
        values = optax.apply_updates(values, updates)
        keep = jnp.minimum(course.average, (number + 1) / (number + 10))
        averaged = jax.tree.map(lambda old, new: keep * old + (1 - keep) * new, averaged, values)
        return values, averaged, moments, {"loss": total, **figures}

    options = OPTIONS.get(jax.default_backend()) if course.own_code else None
    run = jax.jit(step, donate_argnums=(0, 1, 2), compiler_options=options)
    trees, begun, figures = jax.tree.map(jnp.array, (state.weights, state.averaged, state.optimiser)), time.time(), []
    for number in range(state.step, course.steps):
        batch = draw(np.random.default_rng([course.seed, number]))
        with gradients_by_products():
            *trees, said = run(*trees, batch, jnp.int32(number))
        figures.append(said)
        if (number + 1) % course.keep_every == 0 or number + 1 == course.steps:
            means = {key: round(float(np.mean([each[key] for each in figures])), 5) for key in said}
            line = {"step": number + 1, "seconds": round(time.time() - begun, 1), **means}
            values, averaged, moments = trees
            keep_state(Training(values, averaged, moments, number + 1), out / f"{course.name}.npz")
            with (out / f"{course.name}.jsonl").open("a") as log:
                log.write(json.dumps(line) + "\n")
            print(course.name, line, flush=True)
            begun, figures = time.time(), []
    return filled(network, trees[1])


def matrix(weight: Weight) -> MuonDimensionNumbers | None:
    """Which axes of a weight are those of a matrix, in and out; none of what is no matrix, or is looked up in.

    A window's places are counted to the wider side: the work grows with the narrower one.
    """
    rank, first = weight.get_value().ndim, bool(weight.layers)
    looked_up = any(word in weight.source for word in ("table", "embed_tokens", "registers"))
    if rank - first < 2 or looked_up or constant(weight):
        return None
    if weight.layout == PLAIN:
        return MuonDimensionNumbers(rank - 1, rank - 2)
    *_, d_in, d_out = weight.get_value().shape
    window = tuple(range(first, rank - 2))
    if d_in < d_out:
        return MuonDimensionNumbers((rank - 2,), (*window, rank - 1))
    return MuonDimensionNumbers((*window, rank - 2), (rank - 1,))


def constant(weight: Weight) -> bool:
    """Whether a weight is computed, not learned: a filter, a Fourier transform, mel triangles."""
    return weight.source.endswith(("filter", "basis"))


def filled(network: M, values: list[jax.Array]) -> M:
    """`network` with these values of its weights, in the order of `weights`; no gradient reaches a constant."""
    each = iter(values)

    def with_next(weight: Weight) -> Weight:
        value = next(each)
        return weight.with_value(jax.lax.stop_gradient(value) if constant(weight) else value)

    return map_weights(with_next, network)


def keep_state(state: Training, path: Path) -> None:
    """Write a training's state, whole or not at all."""
    leaves = jax.tree.leaves((state.weights, state.averaged, state.optimiser))
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, *map(np.asarray, leaves), step=state.step)


def restored(state: Training, path: Path) -> Training:
    """The state that `keep_state` wrote to `path`, else `state`."""
    if not path.exists():
        return state
    trees = (state.weights, state.averaged, state.optimiser)
    with np.load(path) as kept:
        leaves = [jnp.asarray(kept[f"arr_{i}"]) for i in range(len(jax.tree.leaves(trees)))]
        values, averaged, moments = jax.tree.unflatten(jax.tree.structure(trees), leaves)
        return Training(values, averaged, moments, int(kept["step"]))
