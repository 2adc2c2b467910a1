"""Prompts of parts of a clip: each token reads those of its time."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from clips import PROMPT, Case, Checkpoint, Size, final_latents, plan_of
from ltx2_cli.core.components import Components
from ltx2_cli.nn.attention import Attention, KeysValues, TokenAxis
from ltx2_cli.plan.resolve import resolve
from ltx2_cli.plan.segments import segment_weights
from ltx2_cli.request.layers import read_text
from ltx2_cli.request.profiles import read_spec, to_yaml
from ltx2_cli.weights.declare import Scope
from model_versions import LTX2_3, random_folder
from program import run_program

CASE = Case(Size(17, 64, 64, 24.0), 2, (3.0, 1.0, 1.0, 0.0), (2.0, 0.0, 1.0, 0.0), (1,))
OTHER = "Rain falls."
TWO = {"segments": [{"start": 0.3, "prompt": OTHER}], "segment_fade": 0.2}


@pytest.fixture(params=["2.0", "2.3"])
def model(request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path: Path) -> Checkpoint:
    """Of 2.3, whose layers modulate the text, each device makes keys and values for its own rows."""
    if request.param == "2.0":
        return checkpoint
    return checkpoint._replace(folder=random_folder(LTX2_3, tmp_path))


def difference(got: tuple[np.ndarray, ...], wanted: tuple[np.ndarray, ...]) -> float:
    return max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in zip(got, wanted, strict=True))


@pytest.mark.slow
def test_each_part_reads_its_prompt(model: Checkpoint, compilations: list[str]) -> None:
    """One prompt for all parts is that prompt alone; a part without time changes nothing; other starts and fades
    compile nothing. Eight devices make the same, of 2.3 with NAG."""
    plain, two = plan_of(model, CASE, 5), plan_of(model, CASE, 5, **TWO)
    assert two.prompts == (PROMPT, OTHER, "blurry")
    latents = final_latents(plain)
    parts = final_latents(two, components := Components(two))
    alike = {**TWO, "segments": [{"start": 0.3, "prompt": PROMPT}]}
    assert difference(final_latents(plan_of(model, CASE, 5, **alike)), latents) < 2e-5
    late = {"segments": [{"start": 0.70, "prompt": OTHER}], "segment_fade": 0}
    assert difference(final_latents(plan_of(model, CASE, 5, **late)), latents) < 2e-5
    assert difference(parts, latents) > 1e-3
    compilations.clear()
    components.adopt(other := plan_of(model, CASE, 5, segments=[{"start": 0.5, "prompt": OTHER}]))
    assert difference(final_latents(other, components), parts) > 1e-4
    assert not compilations
    nag = {} if plain.arch.model_version == "ltx2" else {"nag_scale": 5.0}
    wanted = final_latents(plan_of(model, CASE, 5, **nag, **TWO))
    assert difference(final_latents(plan_of(model, CASE, 5, sharding="trillium", **nag, **TWO)), wanted) < 2e-5


def test_a_record_has_the_parts(checkpoint: Checkpoint) -> None:
    plan = plan_of(checkpoint, CASE, 5, **TWO)
    assert resolve(read_spec(config=read_text(to_yaml(plan.spec), "the record"))).spec == plan.spec
    short = read_spec(model="demo", prompt="rain", segments=["0.5s: snow: thick", {"start": 1, "prompt": "sun"}])
    assert [(each.start, each.prompt) for each in short.segments] == [(0.5, "snow: thick"), (1.0, "sun")]


def test_weights_add_up_to_one(checkpoint: Checkpoint) -> None:
    """Of three prompts, by the centres of latent frames at 1/48, 5/48 + n/3 s and of a picture at frame 9."""
    more = {"segments": [{"start": 0.2, "prompt": OTHER}, {"start": 0.4, "prompt": "Snow."}], "segment_fade": 0.1}
    plan = plan_of(checkpoint, CASE, 5, **more)
    video, audio = segment_weights(plan.spec, plan.stages[0].geometry)
    centres = np.repeat([1 / 48, 5 / 24, 13 / 24], 4)
    first, second = (np.clip((centres - start) / 0.1 + 0.5, 0, 1) for start in (0.2, 0.4))
    np.testing.assert_allclose(video, [1 - first, first - second, second], atol=1e-5)
    for each in (video, audio):
        np.testing.assert_allclose(each.sum(axis=0), 1, atol=1e-6)
        assert each.min() >= 0
    assert audio[0, 0] == audio[2, -1] == 1


@pytest.mark.parametrize("gated", [False, True])
def test_results_of_attention_are_added_by_weights(gated: bool) -> None:
    """They are those of attention to each text, as the products behind them are linear."""
    rng, attention = np.random.default_rng(3), Attention(Scope("float32"), 12, 8, 2, 4, gated)
    for weight in (x for x in vars(attention).values() if hasattr(x, "kernel")):
        for name, array in vars(weight).items():
            if hasattr(array, "get_value") and array.get_value() is not None:
                shape = array.get_value().shape
                setattr(weight, name, array.with_value(jnp.asarray(rng.standard_normal(shape), jnp.float32)))
    for name in ("norm_q", "norm_k"):
        setattr(attention, name, getattr(attention, name).with_value(jnp.asarray(rng.standard_normal(8), jnp.float32)))
    x, texts = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 5, 12), (2, 3, 6, 8)))
    weights = jnp.asarray(rng.dirichlet([1, 1, 1], 5).T, jnp.float32)
    each = [attention.keys_values(texts[:, number]) for number in range(3)]
    wanted = sum(weight[:, None] * attention(x, text) for weight, text in zip(weights, each, strict=True))
    context = KeysValues(*(jnp.stack(parts, axis=1) for parts in zip(*each, strict=True)))
    gathered = attention.gather_texts(x, context, weights=weights)
    attended = attention.finish(attention.start(gathered, TokenAxis()), TokenAxis())
    np.testing.assert_allclose(attended, wanted, atol=1e-5)


REFUSED = {
    ("2s: rain", "1s: sun"): "segment 1 s begins no later than the one before it, 2 s; order them",
    ("9s: rain",): "segment 9 s begins outside the clip of 2.04 s",
    ("0: rain",): "segment 0 s begins outside the clip",
    ("1s:  ",): "the segment at 1 s has no prompt",
    ("1s: a\0b",): "segment 'a\\x00b' has a NUL in it; leave it out",
    ("1s: a\udc80b",): "is not text in UTF-8; type or save it as UTF-8",
    ("rain",): "segment 'rain' is not START: TEXT hint: for example: \"3s: it runs\"",
}


@pytest.mark.parametrize("segments", REFUSED)
def test_parts_that_are_none_are_refused(
    segments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for text in segments for word in ("--segment", text)]
    assert run_program(monkeypatch, "generate", "rain", "--model", "demo", *words) == 2
    assert REFUSED[segments] in " ".join(capsys.readouterr().err.split())
    assert not [*tmp_path.iterdir()]


def test_the_plan_names_the_parts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "a fox wakes", "--model", "demo", "--segment", "1s: it runs", "--dry-run"]
    assert run_program(monkeypatch, *words) == 0
    assert "from 1 s it runs" in " ".join(capsys.readouterr().out.split())


def test_parts_and_images_have_their_places_in_the_length_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Not in that of the profile, 2 s; of the other the nearest legal length counts, 5.04 s."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (128, 128)).save("red.png")
    words = ["generate", "a fox", "--model", "demo", "--dry-run", "--duration", "5s", "--image", "red.png@100"]
    assert run_program(monkeypatch, *words, "--segment", "4s: it runs") == 0
    assert "from 4 s it runs" in " ".join(capsys.readouterr().out.split())
    assert run_program(monkeypatch, *words, "--segment", "5.1s: it runs") == 2
    assert "segment 5.1 s begins outside the clip of 5.04 s" in " ".join(capsys.readouterr().err.split())
