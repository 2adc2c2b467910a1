"""Which recipe a checkpoint runs by: read from its configs or its name, under what is asked for, warned about."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clips import Checkpoint
from ltx2_cli import load, read_spec, resolve, run
from ltx2_cli.core.report import Report
from ltx2_cli.diffusion.denoise import Pass, Schedule
from ltx2_cli.errors import UsageError
from ltx2_cli.models.arch import Arch
from ltx2_cli.models.networks import PRESETS
from ltx2_cli.plan.open import missing_downloads
from ltx2_cli.plan.recipe import apply_recipe, is_distilled
from ltx2_cli.plan.request_warnings import TRAINED_ON_FILE, recipe_warnings
from ltx2_cli.request.profiles import to_yaml
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.weights.hub import DEMO_FOLDER
from tools.train_demo.arch import ARCH

LEVELS = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0)
ON, OFF = ((3.0, 1.0, 3.0, 0.7), (7.0, 1.0, 3.0, 0.7)), ((1.0, 0.0, 1.0, 0.0),) * 2
PUBLISHED_SCHEDULE = PRESETS["ltx2"].scheduler
GIVEN = replace(PUBLISHED_SCHEDULE, use_dynamic_shifting=False, shift_terminal=None)  # levels come from elsewhere
CFG = "guidance.video.guidance_scale"


def arch(model_version: str = "ltx2", layers: int = 48, schedule: Schedule = PUBLISHED_SCHEDULE) -> Arch:
    newer = model_version == "ltx2.3"
    transformer = replace(ARCH.transformer, cross_attn_mod=newer, audio_cross_attn_mod=newer, num_layers=layers)
    return replace(ARCH, transformer=transformer, scheduler=schedule)


def asked(model: str = "someone/model", overrides: Mapping[str, object] | None = None, **keys: object) -> RunSpec:
    return read_spec({"prompt": "rain", "model": model, **(overrides or {}), **keys})


def scales(spec: RunSpec) -> tuple[tuple[float, ...], ...]:
    return tuple(vars(spec.guidance.video).values()), tuple(vars(spec.guidance.audio).values())


# Distilled or not


@pytest.mark.parametrize(
    ("name", "distilled"),
    [
        ("rootonchair/LTX-2-19b-distilled", True),
        ("diffusers/LTX-2.3-Distilled-Diffusers", True),
        ("FastVideo/LTX2-Distilled-Diffusers", True),
        ("Lightricks/LTX-2/ltx-2-19b-distilled-fp8.safetensors", True),
        ("Lightricks/LTX-2.3/ltx-2.3-22b-distilled-1.1.safetensors@main", True),
        ("someone/LTX-2-distilled@dev", True),
        ("someone/LTX-2-distilled/model.safetensors", True),
        ("someone/ltx-dev-distilled", True),
        ("Lightricks/LTX-2/ltx-2-19b-dev.safetensors", False),
        ("someone/distilled_experiments/ltx-2-19b-dev.safetensors", False),
        ("someone/LTX-2-undistilled", False),
        ("someone/LTX-2-de-distilled", False),
        ("someone/LTX_2_not_distilled", False),
        ("Lightricks/LTX-2", None),
        ("someone/LTX-2-developer", None),
        ("someone/distillery", None),
        ("someone/LTX-2@distilled", None),
    ],
)
def test_the_name_or_else_the_scheduler_tells_distilled_models(name: str, distilled: bool | None) -> None:
    assert is_distilled(name, PUBLISHED_SCHEDULE) is (distilled or False)
    assert is_distilled(name, GIVEN) is (distilled is None or distilled)


def test_the_last_element_of_a_path_is_the_name(tmp_path: Path) -> None:
    folder = tmp_path / "distilled_experiments"
    (folder / "plain").mkdir(parents=True)
    for name in ("ltx-2-19b-dev", "ltx-2.3-22b-distilled-1.1", "mine"):
        (folder / f"{name}.safetensors").write_text("")
    assert is_distilled(str(folder), PUBLISHED_SCHEDULE)
    assert not is_distilled(str(folder / "plain"), PUBLISHED_SCHEDULE)
    assert not is_distilled(str(folder / "mine.safetensors"), PUBLISHED_SCHEDULE)
    assert not is_distilled(str(folder / "ltx-2-19b-dev.safetensors"), GIVEN)
    assert is_distilled(str(folder / "ltx-2.3-22b-distilled-1.1.safetensors"), PUBLISHED_SCHEDULE)


@pytest.mark.parametrize(
    ("schedule", "distilled"),
    [(Schedule(), True), (Schedule(True), False), (Schedule(shift_terminal=0.1), False), (Schedule(shift=3.0), True)],
)
def test_a_schedule_without_computed_levels_means_a_distilled_model(schedule: Schedule, distilled: bool) -> None:
    assert is_distilled("someone/model", schedule) is distilled


# What is filled in


@pytest.mark.parametrize(
    ("model_version", "schedule", "recipe", "steps", "sigmas", "guidance", "block"),
    [
        ("ltx2", PUBLISHED_SCHEDULE, "one_stage", 40, None, ON, 29),
        ("ltx2.3", PUBLISHED_SCHEDULE, "one_stage", 30, None, ON, 28),
        ("ltx2", GIVEN, "distilled", 8, LEVELS, OFF, 29),
        ("ltx2.3", GIVEN, "distilled", 8, LEVELS, OFF, 28),
    ],
)
def test_defaults_are_those_published_for_the_checkpoint(
    model_version: str, schedule: Schedule, recipe: str, steps: int, sigmas: object, guidance: object, block: int
) -> None:
    spec = apply_recipe(asked(), arch(model_version, schedule=schedule))
    assert (spec.recipe, spec.num_inference_steps, spec.sigmas) == (recipe, steps, sigmas)
    assert (scales(spec), spec.stg_blocks) == (guidance, (block,))
    assert apply_recipe(asked(), arch(model_version, 4, schedule)).stg_blocks == (2,)
    assert list(recipe_warnings(spec, arch(model_version, schedule=schedule))) == []


@pytest.mark.parametrize("schedule", [PUBLISHED_SCHEDULE, GIVEN])
def test_requested_values_stay(schedule: Schedule) -> None:
    spec = apply_recipe(
        asked("ltx2.3", {CFG: 4.0, "guidance.audio.stg_scale": 0.0}, num_inference_steps=5, stg_blocks=[]),
        arch("ltx2.3", schedule=schedule),
    )
    video, audio = scales(spec)
    rest = ON if spec.recipe == "one_stage" else OFF
    assert (video, audio) == ((4.0, *rest[0][1:]), (rest[1][0], 0.0, *rest[1][2:]))
    assert (spec.num_inference_steps, spec.stg_blocks) == (5, ())


def test_a_named_recipe_is_not_overridden() -> None:
    spec = apply_recipe(asked("someone/distilled", recipe="one_stage"), arch("ltx2.3", schedule=GIVEN))
    assert (spec.recipe, spec.num_inference_steps, spec.sigmas, scales(spec)) == ("one_stage", 30, None, ON)
    spec = apply_recipe(asked("ltx2", recipe="distilled"), arch())
    assert (spec.num_inference_steps, spec.sigmas, scales(spec)) == (8, LEVELS, OFF)


def test_a_profile_keeps_its_values_except_for_the_other_kind_of_checkpoint() -> None:
    demo = apply_recipe(asked("demo"), ARCH)
    own = ((3.0, 0.5, 3.0, 0.7), (1.5, 0.25, 1.5, 0.7))
    assert (demo.num_inference_steps, demo.stg_blocks, scales(demo)) == (20, (0,), own)
    other = apply_recipe(asked("ltx2", checkpoint="rootonchair/LTX-2-19b-distilled"), arch())
    assert (other.num_inference_steps, other.sigmas, scales(other)) == (8, LEVELS, OFF)
    assert apply_recipe(asked("ltx2"), arch()).num_inference_steps == 40


def test_other_step_counts_resample_the_noise_levels_of_a_distilled_model() -> None:
    for spec in (asked(num_inference_steps=4), asked(num_inference_steps=4, recipe="distilled")):
        completed = apply_recipe(spec, arch(schedule=GIVEN))
        assert (completed.num_inference_steps, completed.sigmas) == (4, LEVELS[::2])


def test_given_noise_levels_set_the_number_of_steps() -> None:
    for model, schedule in (("someone/model", GIVEN), ("ltx2", PUBLISHED_SCHEDULE)):
        spec = apply_recipe(asked(model, sigmas=[0.9, 0.5, 0.0]), arch(schedule=schedule))
        assert (spec.num_inference_steps, spec.sigmas) == (2, (0.9, 0.5, 0.0))
    levels = tuple(1 - step / 40 for step in range(41))  # as many as the page of ltx2 has steps
    spec = apply_recipe(asked("ltx2", sigmas=levels, checkpoint="someone/distilled"), arch())
    assert (spec.recipe, spec.num_inference_steps, spec.sigmas) == ("distilled", 40, levels)


def test_a_distilled_lora_sets_its_recipe() -> None:
    lora = "Lightricks/LTX-2/ltx-2-19b-distilled-lora-384.safetensors:0.8"
    assert apply_recipe(asked("ltx2", lora=[lora]), arch()).recipe == "distilled"
    assert apply_recipe(asked("ltx2", lora=["someone/style:0.8"]), arch()).recipe == "one_stage"
    assert apply_recipe(asked("ltx2", lora=["someone/distilled-lora:0"]), arch()).recipe == "one_stage"
    assert apply_recipe(asked("ltx2", lora=[lora], recipe="one_stage"), arch()).recipe == "one_stage"


# What is warned about

GUIDED = "guidance costs a distilled model time and gains it nothing; without: "


@pytest.mark.parametrize(
    ("schedule", "request_", "warnings"),
    [
        (PUBLISHED_SCHEDULE, {CFG: 9.0, "num_inference_steps": 100, "stg_blocks": [3]}, []),
        (PUBLISHED_SCHEDULE, {"recipe": "one_stage"}, []),
        (GIVEN, {"recipe": "distilled"}, []),
        (GIVEN, {"guidance.video.guidance_rescale": 0.7}, []),
        (GIVEN, {CFG: 1.0, "num_inference_steps": 8, "negative_prompt": "blur"}, []),
        (GIVEN, {CFG: 3.0}, [f"{GUIDED}--guidance-scale 1"]),
        (
            GIVEN,
            {"recipe": "distilled", "guidance.video.stg_scale": 1.0, "guidance.audio.modality_scale": 3.0},
            [f"{GUIDED}--stg-scale 0 --audio-modality-scale 1"],
        ),
        (GIVEN, {"num_inference_steps": 20}, ["a distilled model was made for 8 steps, not 20: --steps 8"]),
        (GIVEN, {"sigmas": [1.0, 0.5, 0.0]}, ["a distilled model was made for 8 steps, not 2: --steps 8"]),
        (
            GIVEN,
            {"recipe": "one_stage"},
            ["this model is distilled, the recipe `one_stage` is not for it: --recipe distilled"],
        ),
        (
            PUBLISHED_SCHEDULE,
            {"recipe": "distilled", CFG: 3.0},
            ["this model is not distilled, the recipe `distilled` is not for it: --recipe one_stage"],
        ),
        (PUBLISHED_SCHEDULE, {"recipe": "distilled", "lora": ["someone/lora"]}, []),
        (
            PUBLISHED_SCHEDULE,
            {"recipe": "distilled", "lora": ["someone/lora:0"]},
            ["this model is not distilled, the recipe `distilled` is not for it: --recipe one_stage"],
        ),
        (
            PUBLISHED_SCHEDULE,
            {"recipe": "one_stage", "lora": ["someone/distilled-lora:0.5"]},
            ["this model is distilled, the recipe `one_stage` is not for it: --recipe distilled"],
        ),
        (
            PUBLISHED_SCHEDULE,
            {"model": "ltx2", "num_inference_steps": 40, "lora": ["someone/distilled-lora"]},
            ["a distilled model was made for 8 steps, not 40: --steps 8"],
        ),
        (
            PUBLISHED_SCHEDULE,
            {"recipe": "distilled", "lora": ["someone/lora"], CFG: 3.0},
            [f"{GUIDED}--guidance-scale 1"],
        ),
    ],
    ids=str,
)
def test_values_that_contradict_the_checkpoint_are_warned_about_with_a_hint(
    schedule: Schedule, request_: dict[str, object], warnings: list[str]
) -> None:
    networks = arch(schedule=schedule)
    assert list(recipe_warnings(apply_recipe(asked(overrides=request_), networks), networks)) == warnings


# On real folders: the plan, the run, the record


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model without the list of what it was trained on."""
    folder = tmp_path_factory.mktemp("demo") / "checkpoint"
    return shutil.copytree(DEMO_FOLDER, folder, ignore=shutil.ignore_patterns(TRAINED_ON_FILE))


@pytest.fixture(scope="module")
def distilled(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with the scheduler's config of a distilled one."""
    folder = shutil.copytree(demo, tmp_path_factory.mktemp("copy") / "checkpoint")
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_dynamic_shifting": False, "shift_terminal": None}))
    return folder


Record = Callable[[RunSpec], Path]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Resolves a request and writes the record of its run."""

    def write(spec: RunSpec) -> Path:
        path = tmp_path / f"record-{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text(to_yaml(resolve(spec).spec, {"ltx2": "0"}))
        return path

    return write


SMALL = {"height": 128, "width": 192, "num_frames": 9, "seed": 3, "sharding": "single"}


def test_a_distilled_folder_runs_its_noise_levels_with_one_pass(distilled: Path) -> None:
    plan = resolve(asked(str(distilled), SMALL))
    first, second = plan.stages
    np.testing.assert_array_equal(first.sigmas, np.asarray(LEVELS, np.float32))
    np.testing.assert_array_equal(second.sigmas, np.asarray([0.909375, 0.725, 0.421875, 0.0], np.float32))
    assert first.sigmas.dtype == np.float32
    assert [(stage.passes, stage.network) for stage in plan.stages] == [((Pass.COND,), "transformer")] * 2
    assert [stage.shapes.video[2:] for stage in plan.stages] == [(2, 2, 3), (2, 4, 6)]
    assert (plan.prompts, plan.warnings) == (("rain",), ())


def test_a_folder_provides_the_upsampler_of_its_second_stage(
    demo: Path, distilled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then none is downloaded, nor is it named in the record, which holds wherever the folder lies."""
    for model, recipe in ((str(distilled), "auto"), ("demo", "two_stage")):
        spec = asked(model, SMALL, recipe=recipe)
        assert missing_downloads(spec) == []
        plan = resolve(spec)
        (file,) = {tensor.file for tensor in plan.checkpoint.files["upsampler"].values()}
        assert file.is_relative_to(plan.checkpoint.where)
        assert plan.spec.second_stage.upsampler is None
        assert len(plan.stages) == 2


def test_a_folder_that_is_not_distilled_runs_its_schedule_with_every_pass(demo: Path) -> None:
    plan = resolve(asked(str(demo), SMALL))
    (stage,) = plan.stages
    np.testing.assert_array_equal(stage.sigmas, PUBLISHED_SCHEDULE.sigmas(30, 4096))
    assert (stage.passes, plan.spec.stg_blocks, plan.warnings) == (tuple(Pass), (4,), ())


def test_stg_blocks_beyond_the_layers_are_refused_only_with_stg(demo: Path) -> None:
    off = {"guidance.video.stg_scale": 0.0, "guidance.audio.stg_scale": 0.0}
    with pytest.raises(UsageError, match="STG block 29 does not exist: the model has blocks 0 to 5"):
        resolve(asked(str(demo), {**SMALL, **off, "guidance.audio.stg_scale": 1.0}, stg_blocks=[29]))
    assert Pass.PERTURBED not in resolve(asked(str(demo), {**SMALL, **off}, stg_blocks=[29])).stages[0].passes


class Stop(Exception):
    """Ends a run where its first stage would begin."""


class Notes(Report):
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)

    @contextmanager
    def activity(self, name: str) -> Iterator[None]:
        raise Stop
        yield


def test_warnings_are_reported_before_any_work(distilled: Path) -> None:
    untrained = ["the model was trained at", "the model was trained on"]
    embedded = ("demo", {"recipe": "distilled"}, ["this model is not distilled", *untrained])
    for model, unusual, wanted in (
        (str(distilled), {CFG: 3.0}, [GUIDED]),
        (str(distilled), {}, []),
        embedded,
    ):
        plan, notes = resolve(asked(model, {**SMALL, **unusual})), Notes()
        with pytest.raises(Stop):
            next(run(plan, load(plan), notes))
        assert len(notes.said) == len(wanted)
        assert all(said.startswith(start) for said, start in zip(notes.said, wanted, strict=True))


REQUESTS = [{}, {"num_inference_steps": 4}, {CFG: 4.0, "guidance.audio.stg_scale": 0.5}, {"sigmas": [1.0, 0.5, 0.0]}]


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_a_record_is_complete_and_repeats_the_run(
    demo: Path, distilled: Path, record: Record, request_: dict[str, object]
) -> None:
    for folder, recipe in ((demo, "one_stage"), (distilled, "distilled")):
        spec = asked(str(folder), {**SMALL, **request_})
        plan, again = resolve(spec), read_spec(config=record(spec))
        assert again == plan.spec
        assert again.recipe == recipe
        resolved = resolve(again)
        assert (resolved.spec, resolved.warnings) == (plan.spec, plan.warnings)
        np.testing.assert_array_equal(resolved.stages[0].sigmas, plan.stages[0].sigmas)


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_another_model_over_a_record_keeps_only_requested_values(
    demo: Path, distilled: Path, record: Record, request_: dict[str, object]
) -> None:
    others = ("ltx2", "ltx2.3", "demo", "someone/distilled")
    wanted = {other: asked(other, {**SMALL, **request_}) for other in others}
    for folder in (demo, distilled):
        first = record(asked(str(folder), {**SMALL, **request_}))
        assert {other: read_spec(config=first, model=other) for other in others} == wanted
        assert record(read_spec(config=first)).read_text() == first.read_text()  # of a record, one that says the same


def test_another_recipe_over_a_record_sets_its_own_values(distilled: Path, record: Record) -> None:
    path = record(asked(str(distilled), SMALL))
    guided = resolve(read_spec(config=path, recipe="one_stage")).spec
    assert (guided.num_inference_steps, guided.sigmas, scales(guided)) == (30, None, ON)
    assert read_spec(config=path, recipe="auto").recipe == "auto"
    assert resolve(read_spec(config=path, recipe="auto")).spec == resolve(read_spec(config=path)).spec


def test_another_model_version_over_a_record_drops_its_steps(checkpoint: Checkpoint, record: Record) -> None:
    """A folder of the first model version, with 40 steps."""
    path = record(asked(str(checkpoint.folder), {**SMALL, "max_sequence_length": 32}))
    assert read_spec(config=path).num_inference_steps == 40
    assert read_spec(config=path, model="ltx2.3") == asked("ltx2.3", {**SMALL, "max_sequence_length": 32})
