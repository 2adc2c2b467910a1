"""`ltx2 config`: where values come from, all mistakes of a file, the schema."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ltx2_cli.errors import UsageError
from ltx2_cli.request.environment import read_environment
from ltx2_cli.request.layers import spec_values
from ltx2_cli.request.profiles import configs, read_spec, to_yaml
from ltx2_cli.request.schema import settings_schema
from ltx2_cli.request.yaml import parse
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
    monkeypatch.setenv("LTX2_SECOND_STAGE__KEEP_AUDIO", "true")
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
        "second_stage.keep_audio": "environment LTX2_SECOND_STAGE__KEEP_AUDIO",
        "fps": "file page.yaml",
        "recipe": "file page.yaml",
        "guidance.audio.stg_scale": "file page.yaml",
        "guidance.video.stg_scale": "recipe distilled",
        "sigmas": "recipe distilled",
        "sharding.mesh.tokens": "sharding gpu",
        "width": "model demo",
        "image_crf": "model demo",
        "reference_strength": "default",
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


# The environment


def test_variables_are_over_files_and_under_flags(config: Run, monkeypatch: pytest.MonkeyPatch):
    Path("page.yaml").write_text("fps: 30\nwidth: 64\nheight: 64\nsigmas: [1, 0]\n")
    for name, text in (("PROMPT", "a: [b"), ("WIDTH", "96"), ("HEIGHT", "96"), ("NUM_INFERENCE_STEPS", "3")):
        monkeypatch.setenv(f"LTX2_{name}", text)
    _, out, _ = config("show", "--json", "--config", "page.yaml", "--width", "128")
    values = {key: fact["value"] for key, fact in json.loads(out).items()}
    assert [values[key] for key in ("prompt", "fps", "height", "width")] == ["a: [b", 30.0, 96, 128]
    assert [values[key] for key in ("num_inference_steps", "sigmas")] == [3, None]
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
    bad += [{"conditions": [{"path": "a.mp4", "kind": "clip", "regenerate": [1, 2, 3]}]}]
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
