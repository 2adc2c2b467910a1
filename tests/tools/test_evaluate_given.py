"""What is measured of clips that are given pictures, a part of a clip or a sound."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from ltx2_cli.request.profiles import read_spec
from tools.train_demo.captions import PICTURED
from tools.train_demo.evaluate_given import GIVEN, SECOND, alike, asked, request_of, write_files
from tools.train_demo.measure import read_mp4
from tools.train_demo.world import COLOURS, NUM_FRAMES, SHAPES, Scene, draw_frames

SCENE = Scene("circle", "red", "grey", "large", "right", "top", "low", "loud", (0.5, 0.5, 0.5))
OTHERS = [replace(SCENE, **one) for one in ({"colour": "blue"}, {"shape": "square"}, {"place": "bottom"})]


def pixels(scene: Scene) -> np.ndarray:
    return np.round((draw_frames(scene, 128) + 1) * 127.5).astype(np.uint8)


def test_prompts_leave_out_what_a_picture_shows() -> None:
    for scene, prompt in asked(20, PICTURED):
        assert scene.held_out
        assert not set(prompt.replace(",", "").split()) & {*COLOURS, *SHAPES, "large", "small", "top", "ball"}


def test_a_clip_is_like_its_scene_and_no_other() -> None:
    assert all(alike(SCENE, pixels(SCENE)[:SECOND], 0).values())
    assert all(alike(SCENE, pixels(SCENE)[-1:], NUM_FRAMES - 1).values())
    for other, what in zip(OTHERS, ("colour", "shape", "place"), strict=True):
        answers = alike(SCENE, pixels(other)[:SECOND], 0)
        assert [name for name, answer in answers.items() if not answer] == [what]
    assert not alike(SCENE, pixels(SCENE)[:SECOND], SECOND)["place"]


def test_every_variant_is_a_request_of_files_that_are_there(tmp_path: Path) -> None:
    write_files(SCENE, 128, tmp_path)
    assert np.abs(np.asarray(read_mp4(tmp_path / "scene.mp4").frames).astype(int) - pixels(SCENE)).mean() < 3
    for variant in GIVEN.values():
        spec = read_spec({"model": "demo", "prompt": "a"} | request_of(variant, tmp_path))
        files = [Path(each.path) for each in (*spec.conditions, spec.audio) if each]
        assert [file.is_file() for file in files] == [True] * max(1, len(spec.conditions))
