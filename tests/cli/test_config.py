"""`ltx2 config`: where values come from, commands that ask for the same, all mistakes of a file, the schema."""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.main import get_group

from ltx2_cli.cli import app
from ltx2_cli.cli.commands import Generate
from ltx2_cli.cli.config import command_words
from ltx2_cli.cli.generate import configured_spec, overrides, prompt_and_seeds
from ltx2_cli.errors import UsageError
from ltx2_cli.request.environment import read_environment
from ltx2_cli.request.layers import parse, spec_values
from ltx2_cli.request.profiles import configs, read_spec, to_yaml
from ltx2_cli.request.schema import settings_schema
from ltx2_cli.request.spec import RunSpec
from program import run_program

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`ltx2 config` in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: (run_program(monkeypatch, "config", *arguments), *capsys.readouterr())


# show


def test_every_value_has_its_origin(config: Run, monkeypatch: pytest.MonkeyPatch):
    Path("page.yaml").write_text("fps: 30\nguidance: {audio: {stg_scale: 0.5}}\nheight: 64\nrecipe: distilled\n")
    monkeypatch.setenv("LTX2_HEIGHT", "96")
    monkeypatch.setenv("LTX2_SECOND_STAGE__ADAIN", "0.5")
    typed = ("--config", "page.yaml", "--model", "demo", "--sharding", "gpu", "--set", "sharding.mesh.heads=2")
    code, out, err = config("show", "a ball", *typed, "--seed", "1", "2", "--duration", "1s", "--json")
    assert (code, err) == (0, "asked: 1s; got: 128x96, 33 frames, 1.10 s\n")
    values = json.loads(out)
    origins = {key: entry["origin"] for key, entry in values.items()}
    expected = {
        "prompt": "flag",
        "seed": "flag",
        "num_frames": "flag",
        "sharding.mesh.heads": "flag",
        "height": "environment LTX2_HEIGHT",
        "second_stage.adain": "environment LTX2_SECOND_STAGE__ADAIN",
        "fps": "file page.yaml",
        "recipe": "file page.yaml",
        "guidance.audio.stg_scale": "file page.yaml",
        "guidance.video.stg_scale": "recipe distilled",
        "sigmas": "recipe distilled",
        "sharding.mesh.tokens": "sharding gpu",
        "width": "model demo",
        "image_crf": "default",
    }
    assert {key: origins[key] for key in expected} == expected
    assert (values["num_frames"]["value"], values["seed"]["value"], values["height"]["value"]) == (33, [1, 2], 96)
    assert len(values["sigmas"]["value"]) == 9


def test_steps_have_the_origin_of_noise_levels(config: Run):
    _, out, _ = config("show", "--recipe", "distilled", "--set", "sigmas=[1, 0.5, 0]", "--json")
    values = json.loads(out)
    assert values["num_inference_steps"] == {"value": 2, "origin": "flag"}
    _, out, _ = config("show", "--recipe", "distilled", "--steps", "4", "--json")
    values = json.loads(out)
    assert values["num_inference_steps"] == {"value": 4, "origin": "flag"}
    assert (len(values["sigmas"]["value"]), values["sigmas"]["origin"]) == (5, "recipe distilled")


def test_what_is_not_decided_yet_is_said(config: Run):
    Path("model").mkdir()
    _, out, _ = config("show", "--model", "model", "--json")
    values = json.loads(out)
    assert values["recipe"] == {"value": "auto", "origin": "the checkpoint, when it is open"}
    assert values["stg_blocks"] == {"value": None, "origin": "the checkpoint's recipe"}
    assert values["sharding.input_major"]["origin"] == "the profile of the devices"
    _, out, _ = config("show", "--json")
    assert json.loads(out)["recipe"] == {"value": "one_stage", "origin": "the checkpoint's name"}
    assert json.loads(out)["prompt"] == {"value": "", "origin": "default"}
    _, out, _ = config("show", "--duration", "2s", "--json")
    values = json.loads(out)
    assert values["num_frames"] == {"value": 49, "origin": "flag"}
    assert values["prompt"] == {"value": "", "origin": "default"}


def test_the_page_reads_back_and_shows_origins(config: Run):
    code, out, _ = config("show", "a: 'ball'\nfalls # slowly", "--model", "demo", "--sharding", "gpu", "--seed", "7")
    assert code == 0
    assert "height: 128                                   # model demo\n" in out
    Path("again.yaml").write_text(out)
    again = read_spec(config="again.yaml")
    complete = {**spec_values(read_spec(prompt="a: 'ball'\nfalls # slowly", model="demo", sharding="gpu", seed=7))}
    assert {key: value for key, value in spec_values(again).items() if complete[key] is not None} == {
        key: value for key, value in {**spec_values(again), **complete}.items() if complete[key] is not None
    } | {"recipe": "one_stage"}


def test_a_section_has_the_origin_of_what_names_it(config: Run):
    Path("a.yaml").write_text("audio: s.wav\n")
    Path("s.wav").write_bytes(b"")
    _, out, _ = config("show", "rain", "--config", "a.yaml")
    (line,) = (line for line in out.splitlines() if line.startswith("  path: s.wav"))
    assert line.endswith("# file a.yaml")


# show --command


def parsed(words: list[str]) -> RunSpec:
    """The request of words behind `ltx2 generate`."""
    options = Generate(**get_group(app).commands["generate"].make_context("generate", list(words)).params)
    return configured_spec(overrides(options, **prompt_and_seeds(options)), options)


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=9)
NAMES = st.sampled_from(["-x", "a b", "$HOME", "it's", "null", "7", "[", "- ", "~", "a: b", "x@-1:0.5"]) | TEXTS
SCALES = st.floats(-100, 100) | st.integers(-100, 100) | st.none()
MESH = {f"sharding.mesh.{axis}": st.integers(1, 8) for axis in ("passes", "tokens", "heads")}
CHANGES = st.fixed_dictionaries(
    {"prompt": NAMES.filter(str.strip)},
    optional={
        "negative_prompt": NAMES | st.just(""),
        "height": st.integers(1, 9).map(lambda factor: 32 * factor),
        "fps": st.floats(1, 240),
        "seed": st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4, unique=True) | st.sampled_from([[4, 5, 6]]),
        "model": st.sampled_from(["demo", "ltx2.3"]),
        "recipe": st.sampled_from(["distilled", "two_stage"]),
        "compat": st.just("diffusers"),
        "sharding.profile": st.sampled_from(["gpu", "single"]),
        "text_encoder": NAMES,
        "lora": st.lists(NAMES, max_size=2),
        "num_inference_steps": st.integers(1, 9),
        "guidance.video.stg_scale": SCALES,
        "guidance.audio.guidance_scale": SCALES,
        "stg_blocks": st.lists(st.integers(0, 40), max_size=3, unique=True) | st.none(),
        "second_stage.temporal_upsample": st.just("duration"),
        "dtype": st.sampled_from(["float16", "float32"]),
        "conditions": st.sampled_from([[], [{"path": "a.png"}], [{"path": "a.png", "frame": -1, "strength": 0.3}]])
        | st.just([{"path": "b.mp4", "kind": "reference", "strength": 0.5}, {"path": "a.png", "kind": "mask"}])
        | st.just([{"path": "b.mp4", "kind": "video", "num_frames": 9}, {"path": "a.png", "frame": 8}]),
        "audio": st.just({"path": "b.mp4"}),
        "keep_resident": st.booleans(),
        "output": NAMES.map(lambda name: f"{name}.mp4"),
        "base_output_directory": st.none() | NAMES,
        **MESH,
    },
)


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "b.mp4"):
        Path(name).touch()


def is_legal(changes: Mapping[str, Any]) -> bool:
    try:
        return bool(read_spec(changes))
    except UsageError:  # such as a name that is no text
        return False


@given(changes=CHANGES.filter(is_legal))
@settings(max_examples=40, derandomize=True, database=None, deadline=None)
def check_round_trip(changes: Mapping[str, Any]) -> None:
    spec = read_spec(changes)
    assert parsed(command_words(spec)) == spec


def test_the_command_asks_for_the_same_request(pictures: None) -> None:
    check_round_trip()


def test_the_command_has_the_options_of_conditions_and_sound(pictures: None) -> None:
    shown = ["--image", "a.png", "--image", "a.png@-1:0.5", "--reference", "b.mp4:0.5", "--reference-mask", "a.png"]
    for asked in (["--prompt", "a", *shown, "--audio", "b.mp4"], ["--prompt", "a", "--no-video"]):
        assert command_words(parsed(asked)) == asked


def test_the_command_of_a_record_names_what_the_clip_was_given(pictures: None) -> None:
    """A record has hashes, and how many frames of a video were there; all of 17 are half of a clip of 41."""
    asked = ["--prompt", "a", "--num-frames", "41", "--image", "a.png@-1", "--video", "b.mp4", "--audio", "b.mp4"]
    spec = parsed(asked)
    image, video = (replace(condition, sha256="ab") for condition in spec.conditions)
    assert spec.audio
    recorded = replace(spec, audio=replace(spec.audio, sha256="cd"), conditions=(image, replace(video, num_frames=17)))
    assert sorted(command_words(recorded)) == sorted(asked)
    shorter = replace(recorded, conditions=(image, replace(video, num_frames=9)))
    assert "--set" in command_words(shorter)
    assert parsed(command_words(shorter)).conditions == (
        replace(image, sha256=None),
        replace(video, sha256=None, num_frames=9),
    )


def test_the_command_of_a_record_repeats_it(config: Run):
    spec = replace(read_spec(prompt="rain", model="demo", sharding="gpu", seed=5, height=64), output="x.mp4")
    mesh = replace(spec.sharding, mesh={"tokens": 2})  # without an axis that the profile has
    Path("record.yaml").write_text(to_yaml(replace(spec, sharding=mesh)))
    code, out, _ = config("show", "--config", "record.yaml", "--command")
    assert code == 0
    verb, *words = shlex.split(out)[1:]
    assert verb == "generate"
    assert words[:6] == ["--prompt", "rain", "--model", "demo", "--sharding", "gpu"]
    assert parsed(words) == replace(spec, sharding=mesh, output=None)


# The environment


def test_variables_are_over_files_and_under_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    page = tmp_path / "page.yaml"
    page.write_text("fps: 30\nwidth: 64\nheight: 64\nsigmas: [1, 0]\n")
    for name, text in (("PROMPT", "a: [b"), ("WIDTH", "96"), ("HEIGHT", "96"), ("NUM_INFERENCE_STEPS", "3")):
        monkeypatch.setenv(f"LTX2_{name}", text)
    spec = parsed(["--config", str(page), "--width", "128"])
    assert (spec.prompt, spec.fps, spec.height, spec.width) == ("a: [b", 30.0, 96, 128)
    assert (spec.num_inference_steps, spec.sigmas) == (3, None)
    assert spec.asked == ("fps", "height", "num_inference_steps", "prompt", "sigmas", "width")
    assert read_spec(prompt="rain").height == 512  # a library does not read them


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("LTX2_HEIGHT", "tall", "LTX2_HEIGHT: `height` is 'tall'; expected an integer"),
        ("LTX2_SIGMAS", "[1", "LTX2_SIGMAS: the value is not YAML"),
        ("LTX2_FPS", "\udcff", "LTX2_FPS: the value is not YAML"),
    ],
)
def test_a_wrong_variable_is_named(name: str, text: str, sentence: str):
    with pytest.raises(UsageError) as caught:
        read_environment({"HOME": "/", name: text})
    assert str(caught.value) == sentence


# validate


def test_all_mistakes_of_a_file_have_their_lines(config: Run):
    Path("page.yaml").write_text(
        "hieght: 3\nguidance:\n  video:\n    stg_scale: tall\nfps: 1000\nrecipe: foo\nsharding: gpuu\n"
        "compile_cache: x\nseed: [1, 1]\nheight: 100\noutput: ''\n"
    )
    Path("broken.yaml").write_text("height: 64\nwidth: [\n")
    code, out, err = config("validate", "page.yaml", "broken.yaml")
    assert (code, err) == (2, "error: mistakes: 9\nhint: `ltx2 config show` lists all keys\n")
    lines = out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        *(f"page.yaml, line {number}" for number in (1, 4, 5, 6, 7, 9, 10, 11)),
        "broken.yaml, line 3",
    ]
    assert "nearest: fps: 240" in lines[2]
    assert "closest: `gpu`" in lines[4]


def test_a_folder_of_programs_in_a_file_is_refused(config: Run):
    Path("page.yaml").write_text("fps: 30\ncompile_cache: x\n")
    code, out, _ = config("validate", "page.yaml")
    assert code == 2
    assert out.startswith("page.yaml, line 2: `compile_cache` is not taken from a file")


def test_valid_files_are_counted(config: Run):
    Path("page.yaml").write_text("prompt: ''\nsharding: gpu\nseed: 0..3\n")
    record = to_yaml(read_spec(prompt="rain", model="demo", compile_cache="x"), {"versions": {}})
    Path("record.yaml").write_text(record)
    code, out, _ = config("validate", "page.yaml", "record.yaml", str(configs() / "default.yaml"))
    assert code == 0
    assert out.splitlines()[0] == "page.yaml: 3 values, all valid"
    assert len(out.splitlines()) == 3


# path, schema


def test_the_places_exist_or_follow_the_environment(config: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    _, out, _ = config("path", "--json")
    places = json.loads(out)
    assert Path(places["settings"]).read_text().startswith("# Every value of a run")
    assert places["compiled programs"] == "/somewhere/ltx2/programs"
    _, out, _ = config("path")
    assert [line.split("  ")[0] for line in out.splitlines()] == list(places)


def accepts(schema: Mapping[str, Any], value: Any) -> bool:
    """Whether a value follows a schema, of the keywords that this one uses."""
    if unknown := schema.keys() - {*KEYWORDS, *ANNOTATIONS}:
        raise AssertionError(unknown)
    return all(check(schema[word], value, schema) for word, check in KEYWORDS.items() if word in schema)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


TYPES = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": is_number,
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}
ANNOTATIONS = ("$schema", "title", "description", "default", "examples")
KEYWORDS: dict[str, Callable[[Any, Any, Any], bool]] = {
    "minItems": lambda least, value, _: len(value) >= least,
    "maxItems": lambda most, value, _: len(value) <= most,
    "type": lambda kind, value, _: TYPES[kind](value),
    "enum": lambda values, value, _: value in values,
    "anyOf": lambda options, value, _: any(accepts(option, value) for option in options),
    "items": lambda item, value, _: not isinstance(value, list) or all(accepts(item, part) for part in value),
    "required": lambda names, value, _: not isinstance(value, dict) or value.keys() >= set(names),
    "minimum": lambda least, value, _: not is_number(value) or value >= least,
    "maximum": lambda most, value, _: not is_number(value) or value <= most,
    "multipleOf": lambda step, value, _: not is_number(value) or value % step == 0,
    "properties": lambda keys, value, _: (
        not isinstance(value, dict) or all(accepts(keys[name], value[name]) for name in value.keys() & keys.keys())
    ),
    "additionalProperties": lambda others, value, schema: (
        not isinstance(value, dict)
        or all(others and accepts(others, value[name]) for name in value.keys() - schema.get("properties", {}).keys())
    ),
}


def test_the_schema_accepts_every_shipped_page_and_refuses_mistakes(config: Run):
    _, out, _ = config("schema")
    schema = json.loads(out)
    assert schema == json.loads(json.dumps(settings_schema()))
    pages = {path: parse(path.read_text()) for path in configs().rglob("*.yaml")}
    for path, page in pages.items():
        page.pop("extends", None)
        parts = [page, *page.pop("by_recipe", {}).values()]
        for part in parts if path.parent.name != "sharding" else [{"sharding": page}]:
            assert accepts(schema, part), path
    good = [{"seed": 7}, {"seed": "0..3"}, {"seed": None}, {"sharding": "gpu"}, {"stg_blocks": [1]}, {"fps": 24}]
    good += [{"audio": "s.wav"}, {"audio": {"path": "s.wav"}}]
    bad = [{"hieght": 3}, {"height": "tall"}, {"height": 33}, {"fps": 1000}, {"recipe": "foo"}, {"seed": 1.5}]
    bad += [{"guidance": {"video": {"foo": 1}}}, {"sharding": {"mesh": {"heads": "x"}}}, {"conditions": [{}]}]
    bad += [{"conditions": [{"path": "a.mp4", "kind": "clip", "anew": [1, 2, 3]}]}]
    assert [page for page in good if not accepts(schema, page)] == []
    assert [page for page in bad if accepts(schema, page)] == []
    assert schema["properties"]["height"]["description"] == "pixels, a multiple of 32, in two stages of 64"
    assert schema["properties"]["guidance"]["properties"]["video"]["properties"]["stg_scale"]["description"]


def test_a_real_validator_agrees_about_the_schema():
    validator = jsonschema.Draft202012Validator
    validator.check_schema(schema := json.loads(json.dumps(settings_schema())))
    pages = [configs() / "default.yaml", *configs().glob("recipe/*.yaml"), *configs().glob("compat/*.yaml")]
    for path in pages:
        validator(schema).validate(parse(path.read_text()))
    assert not validator(schema).is_valid({"hieght": 3})
