"""Whatever a clip is given, in every recipe: it is held in the last stage, and eight devices make what one makes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from clips import Case, Checkpoint, Size, final_latents, make_latents, plan_of
from loras import ORIGINAL, write_lora
from ltx2_cli.core.components import Components
from ltx2_cli.core.conditions import encode_conditions
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import state_from_latents
from ltx2_cli.core.stage_programs import NO_CONDITION_LATENTS, _conditions
from ltx2_cli.core.state import RunState
from ltx2_cli.diffusion.conditions import Conditions
from ltx2_cli.diffusion.latents import from_tokens, to_tokens
from ltx2_cli.errors import UsageError
from ltx2_cli.media.clip import Media
from ltx2_cli.media.write import write_mp4
from ltx2_cli.plan.resolve import Plan, resolve, stage1_plan
from ltx2_cli.plan.stages import InitialLatents
from ltx2_cli.request.layers import read_text
from ltx2_cli.request.profiles import read_spec, to_yaml
from ltx2_cli.request.spec import Streams
from parity import relative_error
from sounds import tone, write_tone

GUIDED, UNGUIDED = (3.0, 0.0, 1.0, 0.0), (1.0, 0.0, 1.0, 0.0)
DEVICES = {1: "single", 8: {"profile": "ironwood", "mesh": {"passes": 2, "tokens": -1, "heads": 1}}}
RECIPES = {"one_stage": 64, "two_stage": 128, "distilled": 128, "hq": 128}  # the length of a side
FURTHER = {"nag_scale": 11.0, "guidance_interval": (0.05, 0.95)}  # with hq: the first step has no guidance
FPS, RATE = 24.0, 24000
PICTURE, CLIP, LORA = "picture.png", "{side}.mp4", "in-context.safetensors"
FIRST = {"path": PICTURE}
GIVEN: dict[str, dict[str, Any]] = {  # alike in groups: fewer programs are compiled
    "text": {},
    "first image": {"conditions": [FIRST]},
    "last image": {"conditions": [FIRST, {"path": PICTURE, "frame": -1}]},
    "keyframes": {"conditions": [FIRST, {"path": PICTURE, "frame": 4, "strength": 0.8}]},
    "video prefix": {"conditions": [{"path": CLIP, "kind": "video", "num_frames": 9}]},
    "audio": {"audio": "sound.wav"},
    "reference": {"conditions": [FIRST, {"path": PICTURE, "kind": "reference"}], "lora": [LORA]},
    "retake": {"num_frames": 9, "conditions": [{"path": CLIP, "kind": "clip", "regenerate": [2, 7]}]},
}
HELD = {"text": (0, 0), "video prefix": (2, 0), "audio": (0, 18)}  # latents; of all others the first of the picture
CASES = {  # everything in one stage and in the second of two; what is new in other recipes is tested beside these
    "one_stage": ("text", "last image", "audio", "reference"),
    "two_stage": tuple(GIVEN),
    "distilled": ("first image", "retake"),
    "hq": ("keyframes", "audio"),
}
BEHIND = ["last image", "keyframes", "reference"]  # one latent behind the grid; of a reference in the first stage alone


def plan(
    checkpoint: Checkpoint, second_stage: dict[str, object], given: str, recipe: str, devices: int, **more: Any
) -> Plan:
    """Guided in the first stage, and with a LoRA in the second, whatever the recipe: its programs serve all."""
    side, asked = RECIPES[recipe], {"recipe": recipe, "image_crf": 0, **GIVEN[given]}
    asked |= second_stage if recipe != "one_stage" else {}
    asked |= FURTHER if recipe == "hq" else {}
    shown = asked.get("conditions", [])
    asked["conditions"] = [{**condition, "path": condition["path"].format(side=side)} for condition in shown]
    return plan_of(
        checkpoint, Case(Size(17, side, side, FPS), 2, GUIDED, UNGUIDED, (1,)), 5, sharding=DEVICES[devices], **asked
    )


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what clips are given; the videos are silent."""
    folder = tmp_path_factory.mktemp("given")
    coarse = np.random.default_rng(4).integers(0, 256, (3, 3, 3), np.uint8)
    Image.fromarray(coarse).resize((128, 128), Image.Resampling.BICUBIC).save(folder / PICTURE)
    write_tone(folder / "sound.wav", tone(17 / FPS, RATE), RATE)
    for side in {*RECIPES.values()}:
        place = np.arange(side)[:, None, None] + np.arange(side)[:, None] + np.array([0, 40, 80])
        frames = (place + 5 * np.arange(9)[:, None, None, None]) % 128 + 60
        media = Media(frames.astype(np.uint8), np.zeros((0, 2), np.float32), FPS, RATE)
        write_mp4(media, folder / CLIP.format(side=side))
    write_lora(folder / LORA, checkpoint.pipeline, ORIGINAL, 6, {"reference_downscale_factor": "1"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("given", "recipe"), [(given, recipe) for recipe in CASES for given in CASES[recipe]])
def test_it_is_held_and_eight_devices_make_what_one_makes(
    checkpoint: Checkpoint,
    second_stage: dict[str, object],
    folder: Path,
    given: str,
    recipe: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    plans = [plan(checkpoint, second_stage, given, recipe, devices) for devices in DEVICES]
    one, eight = (to_tokens(Streams(*final_latents(plan))) for plan in plans)
    for got, wanted in zip(eight, map(torch.tensor, one), strict=True):
        assert relative_error(got, wanted) <= 2e-5
    stage, number = plans[0].stages[-1], len(plans[0].stages) - 1
    image = stage.geometry.height * stage.geometry.width
    behind = given in BEHIND and (given != "reference" or number == 0)
    assert stage.geometry.video_tokens == stage.geometry.grid_tokens + behind * image
    encoded = encode_conditions(plans[0], plans[0].phases, Components(plans[0]), Report())
    held = _conditions(stage, encoded.get(number, NO_CONDITION_LATENTS))
    counts = [check_held(*stream) for stream in zip(one, held, strict=True)]
    latents, sound = HELD.get(given, (1, 0))
    assert counts == [latents * image, sound]


@pytest.mark.parametrize("given", [given for given in GIVEN if given != "text"])
def test_its_record_asks_for_the_same_and_for_the_same_files(
    checkpoint: Checkpoint, second_stage: dict[str, object], folder: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    made = plan(checkpoint, second_stage, given, "two_stage", 1)
    record = to_yaml(made.spec)
    assert resolve(read_spec(config=read_text(record, "the record"))).spec == made.spec
    file = made.spec.audio or made.spec.conditions[-1]
    kind = "audio" if file is made.spec.audio else file.kind
    changed = file.sha256[::-1].join(record.rsplit(file.sha256, 1))
    with pytest.raises(UsageError, match=f"is (an)?other {kind} than that of the record"):
        resolve(read_spec(config=read_text(changed, "the record")))


def test_runs_go_on_with_a_sound_seed_by_seed_and_from_a_draft(
    checkpoint: Checkpoint, second_stage: dict[str, object], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the middle of either stage, or from the latents of the first; the second of two seeds is that seed alone."""
    monkeypatch.chdir(folder)
    whole, states = plan(checkpoint, second_stage, "audio", "two_stage", 1), list[RunState]()
    both = replace(whole, seeds=(4, *whole.seeds), spec=replace(whole.spec, seed=(4, *whole.seeds)))
    latents = make_latents(both, Components(both), on_progress=lambda state: states.append(kept(state)))
    alone = make_latents(whole, Components(whole))
    np.testing.assert_array_equal(latents.video[1:], alone.video)
    for phase, batch in ((0, 0), (2, 1)):
        middle = next(state for state in states if (state.phase, state.batch, state.step) == (phase, batch, 1))
        np.testing.assert_array_equal(make_latents(both, Components(both), middle).video, latents.video)
    draft = make_latents(stage1_plan(whole), Components(whole))
    shapes = whole.stages[0].shapes
    later = plan(checkpoint, second_stage, "audio", "two_stage", 1, source=InitialLatents(shapes, FPS))
    again = make_latents(later, Components(later), state_from_latents([from_tokens(draft, shapes)]))
    for got, wanted in zip(again, alone, strict=True):
        np.testing.assert_array_equal(got, wanted)


def kept(state: RunState) -> RunState:
    """A state whose latents are not given away when the run goes on."""
    return state if state.current is None else replace(state, current=Streams(*map(np.array, state.current)))


def check_held(made: np.ndarray, held: Conditions | None) -> int:
    """How many tokens of a stream are given at full strength; all are as they were given."""
    if held is None:
        return 0
    tokens = np.flatnonzero(np.asarray(held.strength)[held.level][: made.shape[1]] == 1)
    np.testing.assert_allclose(made[0, tokens], held.clean[tokens], atol=1e-6)
    return len(tokens)
