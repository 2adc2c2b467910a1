"""The training of the embedded model: the whole command, traced, and what the shipped weights make of its batches."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ltx2_cli.models.networks import open_folder
from ltx2_cli.nn.layers import Padding
from ltx2_cli.weights.declare import Shape, weights
from ltx2_cli.weights.hub import DEMO_FOLDER
from tools.train_demo import __main__ as command
from tools.train_demo import arch, denoiser, training
from tools.train_demo.clips import clips
from tools.train_demo.convolution import by_products, convolve
from tools.train_demo.courses import COURSES
from tools.train_demo.shipped import as_denoiser, read_networks
from tools.train_demo.words import LIKE, VOCABULARY

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


def test_the_embedded_weights_match_clips_to_captions(tmp_path: Path) -> None:
    """Those weights were trained to make the loss small on batches as they are drawn: another caption misleads them."""
    networks = read_networks(DEMO_FOLDER)
    learned, (vae, audio_vae) = as_denoiser(networks), (networks["vae"], networks["audio_vae"])
    batch = denoiser.draw(4, clips(4, denoiser.SMALL, vae, audio_vae, tmp_path), np.random.default_rng(1))
    misled = batch | {name: np.roll(batch[name], 1, axis=0) for name in ("ids", "mask")}
    loss = jax.jit(partial(denoiser.loss, denoiser.SMALL))
    right, wrong = (float(loss(learned, each, jax.random.key(0))[0]) for each in (batch, misled))
    assert right < 0.5 * wrong


def test_a_new_word_begins_with_the_embedding_of_a_similar_one(tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO_FOLDER, tmp_path / "checkpoint")
    path = folder / "tokenizer" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    del tokenizer["model"]["vocab"]["hops"]
    path.write_text(json.dumps(tokenizer))
    (rows,) = (
        np.asarray(weight.get_value())
        for weight in weights(read_networks(folder)["text_encoder"])
        if "embed_tokens" in weight.source
    )
    assert len(rows) == len(VOCABULARY)
    hops, like, another = (rows[VOCABULARY.index(word)] for word in ("hops", LIKE["hops"], "grows"))
    np.testing.assert_array_equal(hops, like)
    assert not np.array_equal(hops, another)


@pytest.mark.parametrize(
    ("window", "padding"), [((3, 3), ((1, 1), (0, 2))), ((3, 3), ((0, 0), (1, 1))), ((1, 1), ((0, 0), (0, 0)))]
)
def test_gradients_by_products_equal_those_of_the_convolution(window: Shape, padding: Padding) -> None:
    rng = np.random.default_rng(0)
    x, kernel = (rng.standard_normal(shape, np.float32) for shape in ((2, 7, 6, 3), (*window, 3, 5)))

    def squares(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda x, kernel: jnp.sum(jnp.square(function(x, kernel, padding)))

    found, wanted = (jax.grad(squares(function), argnums=(0, 1))(x, kernel) for function in (by_products, convolve))
    for gradient, reference in zip(found, wanted, strict=True):
        np.testing.assert_allclose(gradient, reference, rtol=1e-5, atol=1e-4)
