"""What is said of the embedded model is what its logs hold, and reaches what was asked of it."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from ltx2_cli.weights.digests import digests
from ltx2_cli.weights.hub import DEMO_FOLDER
from tools.train_demo.courses import COURSES
from tools.train_demo.evaluate import ELSEWHERE, NARROW, OPTIONS, SHORT, VARIANTS
from tools.train_demo.evaluate_given import GIVEN
from tools.train_demo.evaluate_segments import SEGMENTS

HOME = Path(__file__).parents[2] / "tools/train_demo"
README = (HOME / "README.md").read_text().splitlines()
RECIPES = (HOME.parents[1] / "docs/recipes.md").read_text()
COLUMNS = ("colour", "shape", "motion", "pitch", "sync", "size", "background", "place", "loudness")
PARTS, OF_WHOLE = ("colour", "shape", "place"), ("motion", "pitch", "sync", "pan")  # of clips that are given something
LEAST = {"colour": 0.95, "shape": 0.9, "motion": 0.9, "pitch": 0.9, "sync": 0.85}
LEAST_OF_SHORT = {"colour": 0.9, "shape": 0.9, "motion": 0.9}
FOUR_BITS = {"int4 weights", "int4 full"}
FEWER = "options"  # the log of the ways to ask that fewer prompts were asked in


def logged(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HOME / "log" / f"{name}.jsonl").read_text().splitlines()]


def evaluated(name: str = "evaluate") -> dict[str, dict[str, Any]]:
    _, *variants = logged(name)
    return {shares["variant"]: shares for shares in variants}


def test_every_course_is_complete() -> None:
    for name, course in COURSES.items():
        lines = logged(name)
        last = {key: value for key, value in lines[-1].items() if key not in ("step", "seconds", "loss")}
        figures = ", ".join(f"{key} {value:.3g}" for key, value in (last or {"loss": lines[-1]["loss"]}).items())
        minutes = round(sum(line["seconds"] for line in lines) / 60)
        assert lines[-1]["step"] == course.steps
        (row,) = (line for line in README if line.startswith(f"| {name} |"))
        assert row.endswith(f" | {course.steps} | {minutes} | {figures} |")


def test_the_figures_belong_to_the_shipped_weights() -> None:
    for name in ("evaluate", FEWER):
        assert logged(name)[0]["files"] == digests(sorted(DEMO_FOLDER.rglob("*.safetensors")))


def test_held_out_prompts_are_shown_as_often_as_requested() -> None:
    autoencoders = logged("evaluate")[0]["autoencoders"]
    seen = {name: figures for name, figures in evaluated().items() if name in VARIANTS}
    assert (autoencoders["psnr"] >= 30, autoencoders["within_a_quarter"]) == (True, 1)
    assert {name: figures["clips"] for name, figures in seen.items()} == {
        "as it comes": 200,
        SHORT: 200,
        "two stages": 80,
    }
    assert autoencoders["clips"] == 200
    for what, least in LEAST.items():
        assert seen["as it comes"][what] >= least
    for what, least in LEAST_OF_SHORT.items():
        assert seen[SHORT][what] >= least


def test_all_ways_to_ask_were_measured() -> None:
    every = {*VARIANTS, *NARROW, *OPTIONS, *ELSEWHERE, *GIVEN, *SEGMENTS}
    assert evaluated().keys() | evaluated(FEWER).keys() == every
    assert {figures["clips"] for figures in evaluated(FEWER).values()} == {100}


def test_eight_bits_show_as_much_as_sixteen() -> None:
    seen = evaluated(FEWER)
    for name in NARROW.keys() - FOUR_BITS:
        assert [seen[name][what] for what in COLUMNS] == [seen["bfloat16"][what] for what in COLUMNS]


def test_four_bits_show_nearly_as_much() -> None:
    """Of 14 clips that bounce, two or three fewer have a click at each bounce."""
    seen = evaluated(FEWER)
    for name in FOUR_BITS:
        lost = {what: seen["bfloat16"][what] - seen[name][what] for what in COLUMNS}
        assert lost.pop("sync") <= 3.1 / 14
        assert max(lost.values()) <= 0.05


def test_clips_begin_and_end_with_the_pictures_that_they_are_given() -> None:
    seen = {name: figures for name, figures in evaluated().items() if name in GIVEN}
    assert set(seen) == set(GIVEN)
    for name, part, least in (("first picture", "first_second", 0.9), ("first and last picture", "end", 0.95)):
        assert seen[name]["clips"] == 50
        assert min(seen[name][part].values()) >= least


def test_restyled_clips_keep_places_and_take_what_the_prompt_says() -> None:
    """The lower the level, the more of the clip, and the less of the prompt."""
    seen = {name: figures["first_second"] for name, figures in evaluated().items() if "restyled" in name}
    anew, most, some, least = (seen[f"restyled from {level}"] for level in ("1", "0.9", "0.7", "0.5"))
    assert most["place"] >= anew["place"] + 0.25
    assert some["place"] >= 0.9
    assert min(most["colour"], most["shape"], some["colour"]) >= 0.95
    assert least["shape"] <= some["shape"] < most["shape"]
    first, then = ([f"{100 * figures[what]:.3g}" for what in PARTS] for figures in (most, some))
    said = " ".join(RECIPES.split())
    assert f"{first[1]} % the new shape, and {first[2]} % the clip's place" in said
    assert f"({100 * anew['place']:.3g} % from noise alone)" in said
    assert f"from 0.7 {then[0]}, {then[1]} and {then[2]} %." in said


def test_clips_in_windows_change_at_joints_as_elsewhere() -> None:
    """The largest change of two neighbouring frames at a joint, beside those around it."""
    in_windows, whole = evaluated()["long, in windows"], evaluated()["long"]
    assert (in_windows["clips"], whole["clips"]) == (100, 50)
    assert in_windows["joint_no_larger"] >= in_windows["elsewhere_no_larger"] - 0.1
    assert in_windows["joint_ratio"] <= 1.25
    for what in ("colour", "shape", "motion", "pitch"):
        assert in_windows[what] >= 0.9
    assert all(f"{100 * in_windows[name]:.3g} %" in RECIPES for name in ("joint_no_larger", "elsewhere_no_larger"))


def test_the_tables_equal_the_measurements() -> None:
    for name in ("evaluate", FEWER):
        for variant, shares in evaluated(name).items():
            of_parts = [shares[part][what] for part in ("first_second", "end") for what in PARTS if part in shares]
            columns = [*shares][2:] if variant in SEGMENTS else OF_WHOLE if of_parts else COLUMNS
            figures = [*of_parts, *(shares[what] for what in columns)]
            shown = ["-" if np.isnan(share) else f"{100 * share:.3g}" for share in figures]  # -: it applies to none
            assert f"| {variant} | {' | '.join(shown)} |" in README
