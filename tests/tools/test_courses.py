"""The training of the embedded model: the whole command, traced, and a shortened run of what understands captions."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ltx2_cli.models.folder import open_folder
from tools.train_demo import __main__ as command
from tools.train_demo import denoiser
from tools.train_demo.arch import ARCH
from tools.train_demo.clips import Clips, scene_of
from tools.train_demo.courses import COURSES
from tools.train_demo.initial import initial
from tools.train_demo.training import train


def traced(function: Callable[..., Any], **_: object) -> Callable[..., Any]:
    """`function` as if it were compiled: what it gives has its shapes and types, and no values."""

    def run(*arguments: Any) -> Any:
        shapes = jax.eval_shape(function, *arguments)
        return jax.tree.map(lambda each: jnp.ones(each.shape, each.dtype), shapes)

    return run


def test_the_whole_command_goes_from_nothing_to_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every course, one step of it; every network's shapes and gradients."""
    monkeypatch.setenv("GLIBC_TUNABLES", command.MEMORY)
    monkeypatch.setattr(jax, "jit", traced)
    command.main(tmp_path, share=1e-6)
    assert open_folder(tmp_path / "model").arch == ARCH
    for course in COURSES:
        (line,) = (tmp_path / f"{course}.jsonl").read_text().splitlines()
        assert json.loads(line)["step"] == 1


def test_a_shortened_course_learns_what_captions_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents that are a sum of what their scene's words stand for: a caption tells which, and another one misleads."""
    arch = replace(ARCH, transformer=replace(ARCH.transformer, num_layers=1))
    monkeypatch.setattr(denoiser, "ARCH", arch)
    denoiser.ropes.cache_clear()
    clips = meaningful(256)
    course = replace(COURSES["denoiser"], steps=STEPS, warm_up=20, average=0.9, keep_every=20, rate=4e-3)
    loss = partial(denoiser.loss, denoiser.SMALL)
    begun = initial(denoiser.Denoiser(), seed=4)
    learned = train(course, begun, loss, partial(denoiser.draw, 8, clips), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "denoiser.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]

    batch = denoiser.draw(64, clips, np.random.default_rng(1))
    misled = batch | {name: np.roll(batch[name], 1, axis=0) for name in ("ids", "mask")}
    right, wrong = (jax.jit(loss)(learned, each, jax.random.key(0))[0] for each in (batch, misled))
    assert right < 0.93 * wrong


STEPS = 100


def meaningful(count: int) -> Clips:
    scenes = [scene_of(5, number) for number in range(count)]

    def stands_for(word: str, *shape: int) -> np.ndarray:
        seed = [ord(letter) for letter in word]
        return np.broadcast_to(np.random.default_rng(seed).standard_normal(shape[-1]), shape)

    video = [sum(stands_for(word, 7, 4, 4, 32) for word in (each.colour, each.background)) for each in scenes]
    audio = [sum(stands_for(word, 51, 32) for word in (each.pitch, each.loudness)) for each in scenes]
    return Clips(scenes, np.stack(video) / 2**0.5, np.stack(audio) / 2**0.5)
