"""Names of clips by a template, of requests that hold any text."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltx2_cli.artifacts.outputs import MAX_SLUG_BYTES, slug
from ltx2_cli.artifacts.templates import parse_template
from ltx2_cli.errors import UsageError
from ltx2_cli.request.profiles import read_spec

SPEC = read_spec(prompt="A Red ball!", model="ltx2.3", seed=7, width=64, fps=12.5)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("out/{prompt:.5}-{seed}-{width}x{height}.mp4", "out/a-red-7-64x512.mp4"),
        ("{line:04d}_{model}_{fps}.mp4", "0012_ltx2.3_12.5.mp4"),
        ("{seed:06}{{a}}.MP4", "000007{a}.MP4"),
        ("~/plain.mp4", "~/plain.mp4"),
    ],
)
def test_fields_are_filled_in(template: str, name: str) -> None:
    assert parse_template(template)(SPEC, 12) == name


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{promt}.mp4", "unknown field `promt`; closest: `prompt`"),
        ("{}.mp4", "unknown field ``"),
        ("{prompt.x}.mp4", "unknown field `prompt.x`"),
        ("{prompt!r}.mp4", r"\{prompt\} has no format `r`"),
        ("{prompt:>99999}.mp4", r"\{prompt\} has no format `>99999`"),
        ("{seed:{width}}.mp4", r"\{seed\} has no format"),
        ("{seed.mp4", "is no template: expected '}'"),
        ("{seed}.avi", "does not end in .mp4 or .wav"),
        ("{seed}.wav", "names no mp4, which is made"),
        ("{seed:s}.mp4", "cannot be written: Unknown format code 's'"),
        ("{recipe}.mp4", r"has \{recipe\}, which the request leaves open"),
    ],
)
def test_wrong_templates_are_refused(template: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse_template(template)(SPEC, 1)


@given(st.text())
def test_no_text_leaves_the_folder(text: str) -> None:
    name = Path(parse_template("out/{prompt}.mp4")(replace(SPEC, prompt=text), 1))
    assert name.parent == Path("out")
    assert not name.name.startswith(".")
    assert name.name.isprintable()
    assert len(name.name.encode()) <= MAX_SLUG_BYTES + len(".mp4")


def test_the_name_of_a_sound() -> None:
    assert parse_template("{seed}.wav")(replace(SPEC, streams="audio"), 1) == "7.wav"


def test_a_name_is_that_of_generate() -> None:
    for prompt in ("größer, it's 🦊", "雨", "a.b"):
        assert parse_template("{prompt}.mp4")(replace(SPEC, prompt=prompt), 1) == f"{slug(prompt)}.mp4"


def test_the_name_of_no_words() -> None:
    assert parse_template("{prompt}.mp4")(replace(SPEC, prompt="../!"), 1) == "untitled.mp4"


def test_a_field_that_is_left_open_names_its_option() -> None:
    keys = {"steps": "num_inference_steps", "recipe": "recipe", "audio_stg_scale": "guidance.audio.stg_scale"}
    for field, key in keys.items():
        with pytest.raises(UsageError) as error:
            parse_template(f"{{{field}}}.mp4")(SPEC, 1)
        option = f"--{field.replace('_', '-')}"
        assert error.value.hint.startswith(f'{option} for all lines, or "{key}" in each; or')
