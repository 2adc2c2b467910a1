"""Profiles, files and flags make one request; a record brings it back; a mistake is a sentence."""

from collections.abc import Callable
from dataclasses import asdict, fields, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from random import Random

import pytest
import yaml

from ltx2_cli.errors import UsageError
from ltx2_cli.plan.recipe import resample_sigmas
from ltx2_cli.request.layers import ASKED, ConfigLayer
from ltx2_cli.request.profiles import (
    complete_spec,
    configs,
    profile_names,
    read_sharding,
    read_spec,
    recipe_defaults,
    to_yaml,
)
from ltx2_cli.request.spec import AudioSpec, DType, RunSpec, SecondStageSpec, ShardingSpec
from ltx2_cli.request.spelling import short_name
from ltx2_cli.request.yaml import dump, parse

Page = Callable[..., Path]


@pytest.fixture
def page(tmp_path: Path) -> Page:
    """Writes a YAML file and gives its path."""

    def write(text: str, name: str = "page.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(overrides: dict | None = None, **keys: object) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read_spec({"prompt": "rain", **(overrides or {})}, **keys)
    return caught.value


# The layers and their order


def test_the_default_is_ltx2_with_the_recipe_of_the_checkpoint():
    spec = read_spec(prompt="rain")
    assert (spec.height, spec.width, spec.num_frames, spec.fps) == (512, 768, 121, 24.0)
    assert (spec.recipe, spec.sigmas, spec.lora) == ("auto", None, ())
    assert {*vars(spec.guidance.video).values(), *vars(spec.guidance.audio).values()} == {None}
    assert (spec.num_inference_steps, spec.stg_blocks, spec.seed) == (None, None, None)
    assert (spec.model, spec.model_name, spec.checkpoint) == ("ltx2", "ltx2", "Lightricks/LTX-2")
    assert (spec.dtype, spec.compat) == (DType.bfloat16, "ltx-core")
    assert (spec.sharding.profile, spec.sharding.mesh) == ("auto", {})


def test_default_yaml_has_every_key_in_the_order_of_the_spec():
    written = yaml.safe_load((configs() / "default.yaml").read_text())
    assert [*written, ASKED] == [field.name for field in fields(RunSpec)]
    assert list(written["sharding"]) == [field.name for field in fields(ShardingSpec)]
    assert list(written["second_stage"]) == [field.name for field in fields(SecondStageSpec)]


def scales(spec: RunSpec) -> tuple[tuple[float, ...], ...]:
    return tuple(vars(spec.guidance.video).values()), tuple(vars(spec.guidance.audio).values())


def test_recipes_equal_the_published_ones():
    older, newer = (read_spec(prompt="rain", model=model) for model in ("ltx2", "ltx2.3"))
    one_stage = recipe_defaults(older, "one_stage")
    assert scales(one_stage) == ((3.0, 1.0, 3.0, 0.7), (7.0, 1.0, 3.0, 0.7))
    assert (one_stage.num_inference_steps, one_stage.sigmas) == (40, None)
    distilled = recipe_defaults(older, "distilled")
    assert scales(distilled) == ((1.0, 0.0, 1.0, 0.0),) * 2
    assert distilled.num_inference_steps == 8
    assert distilled.sigmas == (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0)
    one_stage = recipe_defaults(newer, "one_stage")
    assert (one_stage.num_inference_steps, one_stage.stg_blocks) == (30, (28,))


@pytest.mark.parametrize("kind", ["model", "recipe", "compat"])
def test_every_shipped_profile_is_readable(kind: str):
    assert all(read_spec({kind: name}, prompt="rain") for name in profile_names(kind))


def test_later_layers_win(page: Page):
    file = page("num_inference_steps: 11\nfps: 30\nheight: 64\nguidance: {audio: {stg_scale: 0.5}}")
    flags = {"height": 96, "guidance.video.stg_scale": 0.25, "fps": 12.0}
    spec = read_spec(flags, config=file, dotlist=["fps=6"], prompt="rain", model="demo", recipe="one_stage")
    assert spec.width == 128  # the model wins over the default
    assert spec.num_inference_steps == 11  # the file over the model
    assert spec.height == 96  # a flag over the file
    assert spec.fps == 6.0  # --set over a flag
    assert (spec.guidance.video.stg_scale, spec.guidance.audio.stg_scale) == (0.25, 0.5)
    assert spec.guidance.audio.guidance_scale is None  # what nobody says is left to the recipe
    assert spec.scan_layers  # or stays as the defaults have it


def test_the_highest_layer_with_a_profile_chooses_it(page: Page):
    file = page("model: demo\nsharding: gpu\ncompat: diffusers")
    spec = read_spec(config=file, prompt="rain")
    assert (spec.checkpoint, spec.sharding.profile) == ("embedded", "gpu")
    assert (spec.follows_diffusers, spec.negative_prompt) == (True, "")
    spec = read_spec(config=file, prompt="rain", model="ltx2", dotlist=["compat=ltx-core", "sharding=trillium"])
    assert (spec.checkpoint, spec.sharding.mesh["embed"]) == ("Lightricks/LTX-2", 1)
    assert not spec.follows_diffusers
    assert len(spec.negative_prompt) > 100


def test_set_parses_yaml_and_flags_are_literal():
    settings = [
        "negative_prompt=${oc.env:HOME}",
        "stg_blocks=[3, 4]",
        "seed=null",
        "sharding.mesh.heads=4",
        "sharding=gpu",
        "fps=1e1",
    ]
    spec = read_spec(
        {"prompt": "${height} [1, 2]: null", "seed": 4}, dotlist=[*settings, "negative_prompt=${oc.env:HOME}"]
    )
    assert (spec.stg_blocks, spec.seed, spec.fps) == ((3, 4), None, 10.0)
    assert spec.sharding.mesh == {"passes": 4, "tokens": -1, "heads": 4}
    assert (spec.prompt, spec.negative_prompt) == ("${height} [1, 2]: null", "${oc.env:HOME}")


# Steps and noise levels: either says the other


def test_noise_levels_set_the_number_of_steps():
    spec = read_spec(prompt="rain", model="demo", dotlist=["sigmas=[1, 0.5, 0.25, 0]"])
    assert (spec.num_inference_steps, spec.sigmas) == (3, (1.0, 0.5, 0.25, 0.0))


def test_steps_and_noise_levels_override_each_other_by_layer(page: Page):
    file = page("sigmas: [1, 0.5, 0]")
    assert read_spec(config=file, prompt="rain", model="demo").num_inference_steps == 2
    spec = read_spec(config=file, prompt="rain", model="demo", num_inference_steps=5)
    assert (spec.num_inference_steps, spec.sigmas) == (5, None)
    spec = read_spec(prompt="rain", recipe="distilled", num_inference_steps=4)
    assert (spec.num_inference_steps, spec.sigmas) == (4, None)
    file = page("num_inference_steps: 5")
    assert read_spec(config=file, prompt="rain", sigmas=[0.9, 0.0]).num_inference_steps == 1
    assert read_spec(config=file, prompt="rain", recipe="distilled").sigmas is None


def test_other_step_counts_resample_the_noise_levels():
    levels = (1.0, 0.9, 0.7, 0.4, 0.0)
    assert resample_sigmas(levels, 4) == levels
    assert resample_sigmas(levels, 2) == (1.0, 0.7, 0.0)
    assert resample_sigmas(levels, 1) == (1.0, 0.0)
    assert resample_sigmas(levels, 8) == pytest.approx((1.0, 0.95, 0.9, 0.8, 0.7, 0.55, 0.4, 0.2, 0.0))
    assert resample_sigmas(levels, 3) == pytest.approx((1.0, 0.9 - 0.2 / 3, 0.7 - 0.2, 0.0))


# Models that are no profile


def test_a_folder_keeps_its_name_and_its_content_decides_the_recipe(tmp_path: Path):
    spec = read_spec(prompt="rain", model=str(tmp_path))
    assert (spec.model, spec.checkpoint, spec.model_name) == (str(tmp_path), str(tmp_path), tmp_path.name)
    assert (spec.num_inference_steps, spec.stg_blocks) == (None, None)


@pytest.mark.parametrize("model", ["someone/LTX-2", "someone/LTX-2@main", "someone/LTX-2@refs/pr/1"])
def test_a_repository_keeps_its_name(model: str):
    spec = read_spec(prompt="rain", model=model)
    assert (spec.checkpoint, spec.model_name, spec.stg_blocks) == (model, "LTX-2", None)


def test_a_link_keeps_its_name(tmp_path: Path):
    (tmp_path / "new").mkdir()
    (tmp_path / "0123abcd").write_text("")
    (tmp_path / "ltx-2-19b-dev.safetensors").symlink_to(tmp_path / "0123abcd")
    spec = read_spec(prompt="rain", model=str(tmp_path / "ltx-2-19b-dev.safetensors"))
    assert spec.model_name == "ltx-2-19b-dev"
    assert spec.text_encoder is not None
    assert read_spec(prompt="rain", model=str(tmp_path / "new" / "..")).model_name == tmp_path.name


@pytest.mark.parametrize(
    ("model_version", "layers", "block"),
    [
        ("ltx2", 48, 29),
        ("ltx2.3", 48, 28),
        ("ltx2", 40, 24),  # 24.17
        ("ltx2.3", 40, 23),  # 23.33
        ("ltx2", 4, 2),
        ("ltx2", 1, 0),
    ],
)
def test_stg_perturbs_the_block_of_the_published_depth(model_version: str, layers: int, block: int):
    spec = read_spec(prompt="rain", model="someone/LTX-2")
    assert recipe_defaults(spec, "one_stage", model_version, layers).stg_blocks == (block,)


@pytest.mark.parametrize(
    ("model", "levels"),
    [(model, (0.909375, 0.725, 0.421875, 0.0)) for model in ("ltx2", "ltx2.3", "someone/LTX-2")]
    + [("demo", (0.2, 0.1, 0.05, 0.0))],
)
def test_the_model_decides_the_noise_levels_of_a_second_stage(model: str, levels: tuple[float, ...]) -> None:
    spec = read_spec(prompt="rain", model=model)
    levels_of = {
        recipe: recipe_defaults(spec, recipe, "ltx2.3").second_stage.sigmas for recipe in ("one_stage", "two_stage")
    }
    assert levels_of == {"one_stage": (), "two_stage": levels}


def test_a_profile_overrides_its_model_version():
    demo = recipe_defaults(read_spec(prompt="rain", model="demo"), "one_stage", "ltx2.3", 4)
    assert (demo.num_inference_steps, demo.stg_blocks, demo.checkpoint) == (20, (0,), "embedded")
    assert scales(demo) == ((3.0, 0.5, 3.0, 0.7), (1.5, 0.25, 1.5, 0.7))
    distilled = recipe_defaults(read_spec(prompt="rain", model="demo"), "distilled", "ltx2.3", 4)
    assert (distilled.stg_blocks, scales(distilled)) == ((0,), ((1.0, 0.0, 1.0, 0.0),) * 2)


def test_a_folder_takes_precedence_over_a_repository_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "someone" / "model@2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert read_spec(prompt="rain", model="someone/model@2").model_name == "model@2"


# Sharding


@pytest.mark.parametrize("name", ["ironwood", "trillium", "gpu", "single"])
def test_sharding_rules_name_mesh_axes(name: str):
    sharding = read_sharding(name)
    assert sharding.profile == name
    assert {*sharding.weights.values(), *sharding.activations.values()} <= set(sharding.mesh)
    assert read_spec(prompt="rain", sharding=name).sharding == sharding


def test_ironwood_and_trillium_differ_in_the_axis_of_embed():
    ironwood, trillium = read_sharding("ironwood"), read_sharding("trillium")
    assert set(trillium.weights.items()) - set(ironwood.weights.items()) == {("embed", "embed")}
    assert set(ironwood.weights.items()) <= set(trillium.weights.items())


def test_a_sharding_file_may_extend_a_profile(page: Page):
    file = str(page("extends: trillium\nmesh: {heads: 4}\nreplicate_vae: false"))
    sharding = read_spec(prompt="rain", sharding=file).sharding
    assert sharding == replace(
        read_sharding("trillium"),
        profile=file,
        mesh={"passes": 4, "tokens": -1, "heads": 4, "embed": 1},
        replicate_vae=False,
    )


def test_values_beside_auto_override_the_chosen_profile():
    asked = read_spec(prompt="rain", dotlist=["sharding.use_batched_text_encoder=false", "sharding.mesh.heads=2"])
    assert asked.sharding.profile == "auto"
    gpu = read_sharding("gpu")
    expected = replace(gpu, use_batched_text_encoder=False, mesh={**gpu.mesh, "heads": 2})
    assert complete_spec(asked, "one_stage", "gpu", "ltx2").sharding == expected
    null = read_spec(prompt="rain", dotlist=["sharding.bf16_tile_sublanes=null"])
    assert complete_spec(null, "one_stage", "ironwood", "ltx2").sharding.bf16_tile_sublanes is None
    older = replace(asked, asked=("sharding.of_another_version",))
    assert complete_spec(older, "one_stage", "gpu", "ltx2").sharding == gpu


def test_a_complete_request_keeps_its_values():
    asked = read_spec(prompt="rain", model="demo", dotlist=["guidance.video.stg_scale=0.25"])
    complete = complete_spec(asked, "one_stage", "single", "ltx2.3", 4)
    assert scales(complete)[0] == (3.0, 0.25, 3.0, 0.7)
    assert (complete.recipe, complete.stg_blocks, complete.sharding) == ("one_stage", (0,), read_sharding("single"))
    assert complete_spec(complete, "one_stage", "gpu", "ltx2", 48) == complete


# Records

PROMPTS = [
    "null",
    "1e5",
    "yes",
    "a: b",
    "# no comment",
    "two\nlines ",
    "{x}",
    "${height} \\${y}",
    "fühl ☂",
    "'\"",
    "0x1F",
    "???",
    "\\???",
    "${",
    "${oc.env:HOME}",
    "\\${oc.env:HOME} \\\\${a}",
    "2020-01-01",
    "=",
    "\x1b[31m\x07",
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_record_gives_the_same_request(prompt: str, page: Page):
    spec = read_spec(prompt=prompt, model="demo", sharding="trillium", seed=2**32 - 1, stg_blocks=[], fps=23.976)
    spec = replace(spec, lora=(prompt, "a/b:0.5"), sigmas=resample_sigmas((1.0, 0.3, 0.0), 8), num_inference_steps=8)
    assert read_spec(config=page(to_yaml(spec))) == spec


def test_a_record_keeps_any_text():
    parts = [
        "$",
        "{",
        "}",
        "${",
        "\\",
        "'",
        '"',
        ":",
        ": ",
        " ",
        "#",
        "\n",
        "-",
        "?",
        "!",
        "&a",
        "*a",
        "☂",
        "é",
        "7",
        "\t",
        ",",
    ]
    texts = ["".join(Random(seed).choices(parts, k=12)) for seed in range(2000)]
    assert parse(dump({"texts": texts})) == {"texts": texts}
    assert len({*texts}) > 1900


def test_plain_values_have_yaml_1_1_types_except_unusual_words_and_numbers():
    numbers = {"1e3": 1000.0, "1e-3": 0.001, "1.5e3": 1500.0, "-7": -7, "0": 0, ".5": 0.5, "1.": 1.0, ".inf": inf}
    others = {"true": True, "FALSE": False, "null": None, "~": None}
    others |= {
        text: text
        for text in ("y", "yes", "off", "2020-01-01", "e3", "1:30", "1:30.5", "0100", "0x1F", "0b1", "1_000", "1_0.5")
    }
    for text, value in {**numbers, **others}.items():
        assert (parse(text), type(parse(text))) == (value, type(value))
    spec = read_spec(prompt="rain", model="demo", dotlist=["compile_cache=off", "keep_resident=yes"])
    assert (spec.compile_cache, spec.keep_resident) == ("off", True)


def test_a_record_has_its_provenance_and_needs_no_files(page: Page):
    mine = page((configs() / "sharding" / "trillium.yaml").read_text(), "mine.yaml")
    spec = read_spec(prompt="rain", sharding=str(mine))
    spec = replace(spec, sharding=replace(spec.sharding, mesh={"heads": 8}, activations={}))
    mine.unlink()
    record = to_yaml(spec, {"ltx2": "0.1", "jax": "9"})
    assert yaml.safe_load(record)["provenance"] == {"ltx2": "0.1", "jax": "9"}
    assert read_spec(config=page(record)) == spec


def test_a_flag_replaces_the_profile_of_a_record(page: Page):
    record = page(to_yaml(read_spec(prompt="rain", height=64, fps=30, sharding="trillium", seed=5)))
    demo = read_spec(config=record, model="demo")
    assert demo == read_spec(prompt="rain", model="demo", height=64, fps=30, sharding="trillium", seed=5)
    assert read_spec(config=record, sharding="gpu").sharding == read_sharding("gpu")
    assert read_spec(config=record, dotlist=["compat=diffusers"]).negative_prompt == ""
    assert read_spec(config=record, compat="ltx-core", sharding="trillium") == read_spec(config=record)


def test_a_record_of_a_folder_that_is_gone_runs_with_another_model(page: Page, tmp_path: Path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    record = page(to_yaml(read_spec(prompt="rain", model=str(folder))))
    folder.rmdir()
    assert read_spec(config=record, model="demo") == read_spec(prompt="rain", model="demo")
    assert "there is no folder" in str(refusal(config=record))


def test_under_another_model_a_record_keeps_requested_values_equal_to_defaults(page: Page):
    usual = read_spec(prompt="rain").height
    record = page(to_yaml(replace(read_spec(prompt="rain", height=usual, stg_blocks=[1], seed=5), recipe="distilled")))
    demo = read_spec(config=record, model="demo")
    assert (demo.height, demo.stg_blocks, demo.seed, demo.recipe) == (usual, (1,), (5,), "auto")
    assert demo.width == read_spec(prompt="rain", model="demo").width
    assert demo.asked == ("height", "model", "prompt", "seed", "stg_blocks")


def test_under_another_sharding_a_record_keeps_everything_else(page: Page):
    spec = replace(read_spec(prompt="rain", sharding="trillium"), recipe="distilled", num_inference_steps=8)
    assert replace(read_spec(config=page(to_yaml(spec)), sharding="gpu"), sharding=spec.sharding) == spec


def test_a_record_without_requested_keys_allows_no_other_model(page: Page):
    record = yaml.safe_load(to_yaml(read_spec(prompt="rain"), {"jax": "9"}))
    del record["asked"]
    for others in ({}, {"asked": 5}):  # an older record, and one that was edited
        unlisted = page(yaml.safe_dump({**record, **others}))
        assert read_spec(config=unlisted, height=64).height == 64
        assert "its model cannot be replaced" in str(refusal(config=unlisted, model="demo"))


def test_the_list_of_requested_keys_cannot_be_set():
    assert "unknown key `asked`" in str(refusal({"asked": ["prompt"]}))


def test_values_of_a_file_stay_under_any_model(page: Page):
    assert read_spec(config=page("height: 512"), prompt="rain", model="demo").height == 512


# Mistakes


@pytest.mark.parametrize(
    ("keys", "sentence", "hint"),
    [
        (
            {"model": "dmo"},
            "unknown model `dmo`; closest: `demo`",
            "known: `demo`, `ltx2`, `ltx2.3`, `ltx2.5`, a folder",
        ),
        ({"model": "/not/there"}, "there is no folder or file `/not/there`", "REPO[/FILE][@REV]"),
        ({"sharding": "ironwod"}, "unknown sharding profile `ironwod`; closest: `ironwood`", "`gpu`, `ironwood`,"),
        (
            {"recipe": "destilled"},
            "unknown recipe `destilled`; closest: `distilled`",
            "`one_stage`, `two_stage`, `auto`",
        ),
        ({"sigmas": 1}, "`sigmas` is 1; expected null or a list, each a number", "config show"),
        ({"lora": "a/b"}, "`lora` is 'a/b'; expected a list, each text", "config show"),
        ({"compat": "difusers"}, "unknown compat `difusers`; closest: `diffusers`", "`ltx-core`"),
        ({"heigth": 64}, "unknown key `heigth`; closest: `height`", "config show"),
        ({"steps": 3, "num_inference_steps": 4}, "`steps` and `num_inference_steps` are one value", "leave one"),
        (
            {"upsampler": "a", "second_stage": {"upsampler": "b"}},
            "`upsampler` and `second_stage.upsampler` are one value",
            "leave one",
        ),
        ({"guidance.video.stg": 1}, "unknown key `guidance.video.stg`", "`guidance.video.stg_scale`"),
        ({"height": "tall"}, "`height` is 'tall'; expected an integer", "config show"),
        ({"height": True}, "`height` is True; expected an integer", "config show"),
        ({"prompt": None}, "`prompt` is None; expected text", "config show"),
        ({"prompt": True}, "`prompt` is True; expected text", "config show"),
        ({"keep_resident": 7}, "`keep_resident` is 7; expected true or false", "config show"),
        ({"seed": 1.5}, "`seed` is 1.5; expected 7, 1 2 3 or 0..15", "for example: --seed 0..15"),
        ({"streams": "sound"}, "`streams` is 'sound'; expected one of both, video, audio", "config show"),
        ({"dtype": "bf16"}, "`dtype` is 'bf16'; expected one of float32, bfloat16, float16", "config show"),
        ({"stg_blocks": "28,29"}, "`stg_blocks` is '28,29'; expected null or a list, each an integer", "config show"),
        ({"guidance": 3}, "`guidance` is 3; expected a section with video, audio", "config show"),
        ({"sharding.mesh": [1]}, "`sharding.mesh` is [1]; expected a section of names, each an integer", "config show"),
        ({"model": 5}, "unknown model `5`", "known: `demo`"),
    ],
)
def test_wrong_names_keys_and_types_are_errors_of_one_sentence(keys: dict, sentence: str, hint: str):
    error = refusal(keys)
    assert str(error).startswith(sentence)
    assert hint in error.hint


BOMB = "a: &a [x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqrstuvwxyz"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("height: 64\nwidth: [1\n", "line 3: this is not plain YAML"),
        ("height: 64\nheight: 96\n", "line 2: this is not plain YAML: found duplicate key height"),
        ("- height", "holds no keys"),
        ("null: 2", "unknown key `null`"),
        ("true: 2", "unknown key `true`"),
        ("height: tall", "`height` is 'tall'; expected an integer"),
        ("model: [demo]", "`model` is ['demo']; expected text"),
        (f"fps: 1{'0' * 400}", "; expected a number"),
        ("heigth: 64", "unknown key `heigth`; closest: `height`"),
        ("sharding: {profile: gpu, mehs: {}}", "unknown key `sharding.mehs`; closest: `sharding.mesh`"),
        ("fps: ${height}", "`fps` is '${height}'; expected a number"),
        ("sigmas: [1, [0]]", "`sigmas` is [1, [0]]; expected null or a list, each a number"),
        ("seed: [1, [2]]", "`seed` is [1, [2]]; expected 7, 1 2 3 or 0..15"),
        ("sharding: {activations: {x: [1]}}", "`sharding.activations.x` is [1]; expected text"),
        ("prompt: !!timestamp 2020-01-01", "line 1: this is not plain YAML: the tag tag:yaml.org,2002:timestamp"),
        ("prompt: !!python/name:os.system", "line 1: this is not plain YAML: the tag tag:yaml.org,2002:python"),
        ("seed: &a [1]\nstg_blocks: *a", "line 1: this is not plain YAML: anchors and aliases are not read"),
        (BOMB, "line 1: this is not plain YAML: anchors and aliases are not read"),
        ("a: " + 100_000 * "[", "line 1: this is not plain YAML: its values are nested more than 32 deep"),
        ("a: [" + 100_000 * "1," + "]", "line 1: this is not plain YAML: it has more than 10,000 keys and values"),
        ("a: " + 1_000_000 * "b", "has more than 1,000,000 bytes"),
        ("a: " + 5_000 * "9", "is not YAML text: a number in it cannot be read"),
        ("42", "holds no keys"),
        ("red", "holds no keys"),
    ],
)
def test_a_broken_file_is_named_in_one_sentence(text: str, sentence: str, page: Page):
    error = refusal(config=page(text))
    assert str(error).startswith(str(page(text)))
    assert sentence in str(error)
    assert error.hint


def test_an_unreadable_file_is_an_error_of_one_sentence(tmp_path: Path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    assert "cannot be read: No such file" in str(refusal(config=tmp_path / "none.yaml"))
    assert "is a folder, not a file" in str(refusal(config=tmp_path))
    assert "is not YAML text" in str(refusal(config=tmp_path / "binary.yaml"))
    assert "cannot be read" in str(refusal(sharding=str(tmp_path / "none.yaml")))


@pytest.mark.parametrize("setting", ["height", "=3", "a..b=3", "height=[1,", "prompt=a: b", "[=", "sigmas=[1,[0]]"])
def test_a_broken_setting_is_an_error_of_one_sentence(setting: str):
    error = refusal(dotlist=[setting])
    assert str(error).startswith(f"--set '{setting}': ")
    assert error.hint


def test_a_finding_is_said_once():
    assert len(str(refusal(prompt="rain", seed=[-1, -1])).splitlines()) == 2


def test_all_wrong_values_are_one_message_with_hints(tmp_path: Path):
    error = refusal(
        {"guidance.audio.stg_scale": float("nan")},
        prompt=" ",
        height=500,
        width=-5,
        num_frames=120,
        fps=0,
        num_videos=0,
        seed=2**32,
        num_inference_steps=1001,
        stg_blocks=[-1],
        max_sequence_length=0,
        output="clip.avi",
        model_name="a/b",
        initial_noise=str(tmp_path / "none.safetensors"),
    )
    lines = str(error).splitlines()
    assert 'the prompt is empty; say what to show: --prompt "..."' in lines
    assert "height 500 is not a multiple of 32; nearest: --height 480 or 512" in lines
    assert "width -5 is not in 32 to 16384; nearest: --width 32" in lines
    assert "num_frames 120 is not 8k + 1; nearest: --num-frames 113 or 121" in lines
    assert "steps 1001 is not in 1 to 1000; nearest: --steps 1000" in lines
    assert "audio_stg_scale nan is not in -100 to 100; nearest: --audio-stg-scale 0" in lines
    others = ("fps", "num_videos", "seed", "stg_blocks", "max_sequence_length", "output", "model_name", "noise file")
    assert all(any(other in line for line in lines) for other in others)
    assert len(lines) == 14


@pytest.mark.parametrize(
    "legal",
    [
        {"height": 32, "width": 4096, "num_frames": 1},
        {"seed": 0},
        {"seed": 2**32 - 1},
        {"seed": 2**32 - 4, "num_videos": 4},
        {"num_inference_steps": 1},
        {"num_inference_steps": 1000},
        {"stg_blocks": [0]},
        {"output": "CLIP.MP4"},
        {"model_name": None},
        {"fps": 1.0},
        {"fps": 240.0},
        {"num_videos": 1000, "seed": 0},
        {"base_output_directory": None},
        {"sigmas": [1.0, 0.0]},
        {"sigmas": [0.25, 0.125, 0.0], "num_inference_steps": 2},
        {"sigmas": [1 - step / 1000 for step in range(1001)]},
    ],
)
def test_boundary_values_are_valid(legal: dict):
    spec = asdict(read_spec(legal, prompt="rain"))
    assert all(spec[key] in (value, (value,)) or spec[key] == tuple(value) for key, value in legal.items())


@pytest.mark.parametrize(
    ("said", "seeds"),
    [(7, (7,)), ("7", (7,)), ([7, 2], (7, 2)), ("0..3", (0, 1, 2, 3)), ("9 1..2,5", (9, 1, 2, 5)), (None, None)],
)
def test_seeds_are_parsed(said: object, seeds: tuple[int, ...] | None, tmp_path: Path):
    assert read_spec(prompt="rain", seed=said).seed == seeds
    record = tmp_path / "record.yaml"
    record.write_text(to_yaml(read_spec(prompt="rain", seed=said)))
    assert read_spec(config=record).seed == seeds
    assert ("\nseed: 7\n" in record.read_text()) is (seeds == (7,))


@pytest.mark.parametrize(
    ("illegal", "nearest"),
    [
        ({"seed": []}, "--seed 0..3"),
        ({"seed": "3..1"}, "--seed 0..3"),
        ({"seed": [2, 1, 2]}, "--seed 0..3 --num-videos 1"),
    ],
)
def test_wrong_seeds_are_refused(illegal: dict, nearest: str):
    assert str(refusal(illegal)).endswith(nearest)


@pytest.mark.parametrize(
    ("illegal", "nearest"),
    [
        ({"height": 0}, "--height 32"),
        ({"num_frames": 0}, "--num-frames 1"),
        ({"seed": -1}, "--seed 0 to 4294967295"),
        ({"seed": 2**32 - 3, "num_videos": 4}, "--seed 0 to"),
        ({"num_videos": 10**8}, "--num-videos 1000"),
        ({"fps": 0.999}, "--fps 1"),
        ({"fps": 240.5}, "--fps 240"),
        ({"fps": float("inf")}, "--fps 240"),
        ({"fps": float("nan")}, "--fps 1"),
        ({"num_frames": 2**14 + 9}, "--num-frames 16385"),
        ({"width": 2**14 + 32}, "--width 16384"),
        ({"guidance.video.guidance_scale": -1e6}, "--guidance-scale -100"),
        ({"guidance.audio.modality_scale": 1e38}, "--audio-modality-scale 100"),
        ({"guidance.video.guidance_rescale": 50}, "--guidance-rescale 1"),
        ({"sampler": "eulr_ancestral"}, "--sampler euler_ancestral"),
        ({"eta": 1.5}, "--eta 1"),
        ({"vae_memory_gb": 0}, "--set vae_memory_gb=1e-06"),
        ({"sharding.bf16_tile_sublanes": 0}, "--set sharding.bf16_tile_sublanes=1"),
        ({"max_sequence_length": 2**17 + 1}, "--set max_sequence_length=131072"),
        ({"stg_blocks": [2, 1, 2]}, "--stg-blocks 2,1"),
        ({"seed": "0..999999999"}, "--seed 0..999 --num-videos 1"),
        ({"output": ".mp4"}, "-o video.mp4"),
        ({"output": "out/.mp4"}, "-o out/video.mp4"),
        ({"output": ".."}, "-o ../video.mp4"),
        ({"output": "out/clip.avi"}, "-o out/clip.mp4"),
    ],
)
def test_values_beyond_the_boundaries_are_refused(illegal: dict, nearest: str):
    (line,) = str(refusal(illegal)).splitlines()
    assert next(iter(illegal)).rpartition(".")[2] in line or line.startswith("more than 1000 clips")
    assert line.endswith(nearest) or nearest in line


@pytest.mark.parametrize(
    "sigmas",
    [[], [0.0], [1.0], [1.1, 0.0], [1.0, 0.5], [1.0, 0.5, 0.5, 0.0], [1.0, 0.2, 0.5, 0.0], [float("nan"), 0.0]],
)
def test_noise_levels_must_fall_from_at_most_1_to_0(sigmas: list[float]):
    (line,) = str(refusal(sigmas=sigmas)).splitlines()
    assert "do not fall from at most 1 to 0; for example: --set 'sigmas=[1, " in line


def test_noise_levels_that_contradict_the_steps_are_refused():
    (line,) = str(refusal(sigmas=[1.0, 0.5, 0.0], num_inference_steps=8)).splitlines()
    assert line == "sigmas has 3 noise levels, which is not 8 steps but --steps 2"
    (line,) = str(refusal(sigmas=[1 - step / 1001 for step in range(1002)])).splitlines()
    assert line.startswith("sigmas has 1002 noise levels, at most 1001 are")


@pytest.mark.parametrize("key", ["text_encoder", "initial_noise", "save_latents", "output", "second_stage.upsampler"])
def test_an_empty_name_is_refused(key: str):
    assert str(refusal({key: ""})) == f"{short_name(key)} is empty; leave it out, or name one"


def test_an_empty_lora_is_refused():
    assert str(refusal(lora=[""])) == "lora is empty; leave it out, or name one"


@pytest.mark.parametrize("seed", ["0..", "..3", "a", "1..2..3", "9" * 5000])
def test_wrong_ranges_of_seeds_are_refused(seed: str):
    assert "expected 7, 1 2 3 or 0..15" in str(refusal(seed=seed))


def test_numbers_that_yaml_1_1_misreads_are_refused():
    assert "`fps` is '1:30'; expected a number" in str(refusal(dotlist=["fps=1:30"]))
    assert "height 100 is not a multiple of 32" in str(refusal(dotlist=["height=0100"]))


def test_line_breaks_in_values_are_escaped():
    error = refusal(initial_noise="a\nerror: b")
    assert str(error) == "there is no noise file a\\nerror: b; check the path"


def test_a_lora_path_that_is_not_utf_8_is_refused():
    assert "lora 'r\\udce9.safetensors' is not text" in str(refusal(lora=["a", "r\udce9.safetensors"]))


@pytest.mark.parametrize("key", ["prompt", "negative_prompt", "output", "save_latents"])
def test_text_that_is_not_utf_8_is_refused(key: str):
    broken = b"r\xe9sum\xe9.mp4".decode("utf-8", "surrogateescape")
    assert f"{key} 'r\\udce9sum\\udce9.mp4' is not text in UTF-8" in str(refusal({key: broken}))


def test_noise_paths_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "there is no noise file ~/noise" in str(refusal(initial_noise="~/noise"))
    (tmp_path / "noise").write_text("")
    assert read_spec(prompt="rain", initial_noise="~/noise").initial_noise == "~/noise"


def test_a_model_profile_may_set_values_of_a_recipe() -> None:
    """The demo's two stages end at twice the size of its one stage; what is asked for wins."""
    sizes = [
        (spec.height, spec.width)
        for spec in (
            read_spec(prompt="rain", model="demo"),
            read_spec(prompt="rain", model="demo", recipe="two_stage"),
            read_spec(prompt="rain", model="demo", recipe="two_stage", width=512),
        )
    ]
    assert sizes == [(128, 128), (256, 256), (256, 512)]


def picture(place: Path, **others: object) -> dict[str, object]:
    path = place / "p.png"
    path.touch()
    return {"path": str(path), **others}


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ([{"strength": 1.5}], "strength 1.5 of {0} is not in 0 to 1; nearest: --image {0}@0:1"),
        ([{"strength": float("nan")}], "strength nan of {0} is not in 0 to 1; nearest: --image {0}@0:0"),
        ([{"frame": 121}], "frame 121 of {0} is not in -121 to 120; nearest: --image {0}@120"),
        ([{"frame": -122}], "frame -122 of {0} is not in -121 to 120; nearest: --image {0}@-121"),
        ([{"frame": 120}, {"frame": -1}], "{0} and {0} are both shown at frame 120; nearest: --image {0}@119"),
        ([{"path": "absent.png"}], "there is no image absent.png; check the path"),
        (
            [{"kind": "reference", "strength": 2}],
            "strength 2 of {0} is not in 0 to 1; nearest: --reference {0}:1",
        ),
        (
            [{"kind": "reference", "path": "absent.mp4"}],
            "there is no reference absent.mp4; check the path",
        ),
        ([{"kind": "reference", "frame": 8}], "the reference {0} has no frame of its own; leave it out"),
        ([{"kind": "reference", "downscale": 0}], "downscale 0 of {0} is not in 1 to 99; nearest: downscale: 1"),
        ([{"kind": "mask"}], "reference_mask is of a reference, and none is given; name one: --reference FILE"),
        (
            [{"kind": "reference"}, {"kind": "mask"}, {"kind": "mask"}],
            "2 masks of references are given; nearest: one, and a video may change",
        ),
    ],
)
def test_pictures_that_cannot_be_shown_are_refused(tmp_path: Path, others: list[dict], sentence: str):
    conditions = [picture(tmp_path, **other) for other in others]
    assert str(refusal(conditions=conditions)) == sentence.format(tmp_path / "p.png")


@pytest.mark.parametrize("conditions", ["p.png", ["p.png"], [{"frame": 3}], [{"path": "p", "at": 3}], [{"path": []}]])
def test_pictures_have_a_path_a_frame_and_a_strength(conditions: object):
    assert "; expected a list, each a section with path, frame, strength" in str(refusal(conditions=conditions))


def test_a_strength_without_a_reference_is_refused(tmp_path: Path):
    alone = "reference_strength 0.5 is of a reference, and none is given; name one: --reference FILE"
    assert str(refusal(reference_strength=0.5)) == alone
    several = [picture(tmp_path, kind="reference")] * 2
    assert read_spec(prompt="rain", conditions=several, reference_strength=0.5).reference_strength == 0.5


def test_a_sound_is_a_file(tmp_path: Path):
    sound = tmp_path / "s.wav"
    sound.touch()
    spec = read_spec(prompt="rain", audio=str(sound))
    assert spec.audio == AudioSpec(str(sound))
    assert read_spec(prompt="rain", audio={"path": str(sound)}) == spec
    assert read_spec(config=ConfigLayer("", parse(to_yaml(spec)))) == spec
    assert str(refusal(audio="absent.wav")) == "there is no audio absent.wav; check the path"
    assert str(refusal(audio="")).startswith("audio is empty; leave it out, or name one")
    assert "; expected null or a section with path, sha256" in str(refusal(audio=["s.wav"]))


def test_pictures_are_kept_in_a_record(tmp_path: Path):
    spec = read_spec(prompt="rain", conditions=[picture(tmp_path, frame=-1, strength=0.5)], image_crf=20)
    assert read_spec(config=ConfigLayer("", parse(to_yaml(spec)))) == spec
