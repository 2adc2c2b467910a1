"""The training of the embedded model: the whole command, traced."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from ltx2_cli.models.open_checkpoint import open_folder
from tools.train_demo import __main__ as command
from tools.train_demo import arch, denoiser, training
from tools.train_demo.courses import COURSES

# One block of the denoiser: training compiles each by itself.
ONE_LAYER = replace(arch.ARCH, transformer=replace(arch.ARCH.transformer, num_layers=1))


def traced(function: Callable[..., Any], **_: object) -> Callable[..., Any]:
    """`function` as if it were compiled: what it gives has its shapes and types, and no values."""

    def run(*arguments: Any) -> Any:
        shapes = jax.eval_shape(function, *arguments)
        return jax.tree.map(lambda each: np.ones(each.shape, each.dtype), shapes)

    return run


DIFFERENTIATED = {"video_vae", "audio_vae", "vocoder", "upsampler", "denoiser"}  # the other courses have their losses
ALIKE = {"frames", "moving", "large", "brief"}  # courses whose losses and batches are those of the course before


def first_optimised(*settings: object, courses: Iterator[str], optimiser: Callable[..., Any], **named: object) -> Any:
    """`optax.contrib.muon` in the courses of `DIFFERENTIATED`; elsewhere gradients are added as they are."""
    return optimiser(*settings, **named) if next(courses) in DIFFERENTIATED else optax.identity()


def first_differentiated(
    loss: Callable[..., Any], has_aux: bool, courses: Iterator[str], differentiate: Callable[..., Any]
) -> Callable[..., Any]:
    """`jax.value_and_grad` in the courses of `DIFFERENTIATED`; elsewhere gradients are as large as values, and in those
    of `ALIKE` the loss is 0."""
    course = next(courses)
    if course in DIFFERENTIATED:
        return differentiate(loss, has_aux=has_aux)
    return lambda values: ((0.0, {}) if course in ALIKE else loss(values), values)


@pytest.mark.slow
def test_the_command_trains_a_complete_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every course, one step of it; every network's shapes and gradients."""
    monkeypatch.setenv("GLIBC_TUNABLES", command.MEMORY)
    monkeypatch.setattr(jax, "jit", traced)
    gradients = partial(first_differentiated, courses=iter(COURSES), differentiate=jax.value_and_grad)
    monkeypatch.setattr(jax, "value_and_grad", gradients)
    monkeypatch.setattr(training, "muon", partial(first_optimised, courses=iter(COURSES), optimiser=training.muon))
    monkeypatch.setattr(arch, "ARCH", ONE_LAYER)
    monkeypatch.setattr(denoiser, "ARCH", ONE_LAYER)
    denoiser.ropes.cache_clear()
    command.main(tmp_path, share=1e-6)
    assert open_folder(tmp_path / "model").arch == ONE_LAYER
    for course in COURSES:
        (line,) = (tmp_path / f"{course}.jsonl").read_text().splitlines()
        assert json.loads(line)["step"] == 1
