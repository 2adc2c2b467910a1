"""The training of the embedded model: the whole command, traced, and what the shipped weights make of its batches."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ltx2_cli.models.audio_vae import AudioVAE
from ltx2_cli.models.folder import open_folder
from ltx2_cli.models.gemma import Gemma
from ltx2_cli.models.networks import abstract_networks
from ltx2_cli.models.video_vae import VideoVAE
from ltx2_cli.spec import DType
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.hub import INSIDE
from ltx2_cli.weights.load import load
from tools.train_demo import __main__ as command
from tools.train_demo import arch, denoiser
from tools.train_demo.clips import clips
from tools.train_demo.courses import COURSES

# One block of the denoiser: training compiles each by itself.
ONE_LAYER = replace(arch.ARCH, transformer=replace(arch.ARCH.transformer, num_layers=1))


def traced(function: Callable[..., Any], **_: object) -> Callable[..., Any]:
    """`function` as if it were compiled: what it gives has its shapes and types, and no values."""

    def run(*arguments: Any) -> Any:
        shapes = jax.eval_shape(function, *arguments)
        return jax.tree.map(lambda each: np.ones(each.shape, each.dtype), shapes)

    return run


def test_the_whole_command_goes_from_nothing_to_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every course, one step of it; every network's shapes and gradients."""
    monkeypatch.setenv("GLIBC_TUNABLES", command.MEMORY)
    monkeypatch.setattr(jax, "jit", traced)
    monkeypatch.setattr(arch, "ARCH", ONE_LAYER)
    monkeypatch.setattr(denoiser, "ARCH", ONE_LAYER)
    denoiser.ropes.cache_clear()
    command.main(tmp_path, share=1e-6)
    assert open_folder(tmp_path / "model").arch == ONE_LAYER
    for course in COURSES:
        (line,) = (tmp_path / f"{course}.jsonl").read_text().splitlines()
        assert json.loads(line)["step"] == 1


def test_the_embedded_weights_tell_a_clip_by_its_caption(tmp_path: Path) -> None:
    """Those weights were trained to make the loss small on batches as they are drawn: another caption misleads them."""
    learned, vae, audio_vae = embedded()
    batch = denoiser.draw(8, clips(8, denoiser.SMALL, vae, audio_vae, tmp_path), np.random.default_rng(1))
    misled = batch | {name: np.roll(batch[name], 1, axis=0) for name in ("ids", "mask")}
    loss = jax.jit(partial(denoiser.loss, denoiser.SMALL))
    right, wrong = (float(loss(learned, each, jax.random.key(0))[0]) for each in (batch, misled))
    assert right < 0.5 * wrong


def embedded() -> tuple[denoiser.Denoiser, VideoVAE, AudioVAE]:
    """The embedded model's networks as training has them, with its weights."""
    found, device = open_folder(INSIDE), Mesh(np.array(jax.devices()[:1]), ("one",))
    text_encoder = Gemma(Scope("float32", found.prefix), found.text_encoder)
    networks = abstract_networks(found.arch, text_encoder, DType.float32, scan_layers=False)
    place = NamedSharding(device, PartitionSpec())
    names = ("text_encoder", "connectors", "transformer", "vae", "audio_vae")
    loaded = {name: load(networks._asdict()[name], found.files[name], lambda weight: place) for name in names}
    learned = denoiser.Denoiser()
    learned.text_encoder, learned.connectors = loaded["text_encoder"], loaded["connectors"]
    learned.transformer = loaded["transformer"]
    return learned, loaded["vae"], loaded["audio_vae"]
