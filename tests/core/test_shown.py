"""What the embedded model shows and sounds like, of prompts that it was not trained on: measured from its mp4s."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from ltx2_cli.media.contact_sheet import GAP, LONGER_SIDE
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.weights.hub import DEMO_FOLDER
from program import run_program
from tools.train_demo import evaluate
from tools.train_demo.evaluate import filmed, held_out, held_out_briefly
from tools.train_demo.measure import Seen, judge, shares
from tools.train_demo.world import Scene

ROOT = Path(__file__).parents[2]
OPEN = "a shape stays still in the middle on a black background with a low tone"  # says neither what nor of what colour
SEEDS = range(2)
WHAT = ("colour", "shape", "motion", "pitch", "sync", "background", "size", "place", "loudness")

Asked = Sequence[tuple[str, int]]  # prompts and seeds


def held_out_scenes() -> list[tuple[Scene, str, int]]:
    """The first prompts of the evaluation, and those of its first bounces, each with the seed that it has there."""
    numbered = [(scene, caption.text, seed) for seed, (scene, caption) in enumerate(held_out(80))]
    bounces = [each for each in numbered[3:] if each[0].motion == "bounce"]
    return [*numbered[:3], bounces[0]]


def film(request: Mapping[str, object], prompt: str = OPEN, seeds: range = SEEDS) -> list[Seen]:
    """Short clips in half of the usual steps: nothing moves in them."""
    return list(filmed([(prompt, seed) for seed in seeds], {"num_inference_steps": 10, "num_frames": 17} | request))


class Evaluated(NamedTuple):
    """The clips that an evaluation made, and what it printed of them."""

    requests: list[Asked]
    seen: list[Seen]
    printed: list[dict[str, Any]]


@pytest.fixture(scope="module")
def evaluated() -> Evaluated:
    """The evaluation of one clip, in the usual steps, and of one that begins with a picture."""
    requests, seen = list[Asked](), list[Seen]()

    def record(asked: Asked, request: Mapping[str, object]) -> Iterator[Seen]:
        requests.append(asked)
        for clip in filmed(asked, request):
            seen.append(clip)
            yield clip

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
        patch.setattr(evaluate, "filmed", record)
        evaluate.main(count=1, checkpoint=str(DEMO_FOLDER), variants="as it comes; first picture")
    return Evaluated(requests, seen, [json.loads(line) for line in out.getvalue().splitlines()])


@pytest.fixture(scope="module")
def shown(evaluated: Evaluated) -> list[tuple[Scene, Seen]]:
    """The first clip as the evaluation makes it, the others in half of its steps."""
    others = [(prompt, seed) for _, prompt, seed in held_out_scenes()[1:]]
    seen = [*evaluated.seen, *filmed(others, {"num_inference_steps": 10})]
    return [(scene, clip) for (scene, *_), clip in zip(held_out_scenes(), seen, strict=True)]


@pytest.fixture(scope="module")
def variety() -> list[Seen]:
    return film({})


def test_a_clip_shows_and_sounds_like_its_prompt(shown: list[tuple[Scene, Seen]]) -> None:
    found = shares(*zip(*shown, strict=True))
    assert all(found[what] >= 0.9 for what in WHAT), found


def test_a_clip_does_not_match_another_prompt(shown: list[tuple[Scene, Seen]]) -> None:
    """So that the shares above mean something."""
    scenes, seen = zip(*shown, strict=True)
    others = [judge(*pair) for pair in zip(scenes, [*seen[1:], seen[0]], strict=True)]
    for what in ("colour", "shape", "motion", "pitch"):
        assert np.mean([each[what] for each in others]) < 0.7


def test_the_seed_decides_what_the_prompt_leaves_open(variety: list[Seen]) -> None:
    assert len({each.colour for each in variety}) > 1
    assert {each.motion for each in variety} == {"still"}


def test_content_of_the_negative_prompt_is_not_shown(variety: list[Seen]) -> None:
    (without,) = film({"negative_prompt": str(variety[0].colour)}, seeds=SEEDS[:1])
    assert without.colour != variety[0].colour


def test_a_short_prompt_is_shown() -> None:
    """What it need not say is as documented: large, still, on black."""
    scenes, captions = zip(*held_out_briefly(3), strict=True)
    asked = [(caption.text, seed) for seed, caption in enumerate(captions)]
    seen = list(filmed(asked, {"num_inference_steps": 10}))
    found = shares(scenes, seen, [evaluate.OPEN - caption.stated for caption in captions])
    assert all(found[what] >= 0.8 for what in ("colour", "shape", "motion", "background", "size")), found


def test_the_second_stage_sharpens() -> None:
    """At twice the size, the default of two stages, edges are narrower as a share of the picture."""
    small, large = ({}, {"recipe": "two_stage"})
    prompt = "a large red square stays still in the middle on a white background with a low tone"
    (once,), (twice,) = (film(request, prompt, range(1)) for request in (small, large))
    assert (twice.colour, twice.shape, twice.motion) == ("red", "square", "still")
    assert twice.edge < 0.85 * once.edge


def test_the_evaluation_prints_its_measurements(evaluated: Evaluated) -> None:
    first, variant, from_picture = evaluated.printed
    assert (first.get("variant"), variant["variant"]) == (None, "as it comes")
    assert first["autoencoders"]["psnr"] > 25
    assert first["autoencoders"]["within_a_quarter"] == 1
    assert len(first["files"]) == 7
    scene, prompt, seed = held_out_scenes()[0]
    assert evaluated.requests == [[(prompt, seed)]]
    (seen,) = evaluated.seen
    for request in (evaluate.VARIANTS | evaluate.ELSEWHERE).values():
        read_spec({"prompt": "a", "model": "demo"} | request)  # raises nothing
    figures = {"variant": "as it comes", "clips": 1} | shares([scene], [seen]) | {"edge": round(seen.edge, 4)}
    assert variant == json.loads(json.dumps(figures))
    assert (from_picture["variant"], from_picture["clips"]) == ("first picture", 1)
    assert from_picture["first_second"] == {"colour": 1, "shape": 1, "place": 1}


def test_the_frames_in_the_docs_are_made_by_their_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/demo.md").read_text(encoding="utf-8").replace("\\\n", "")
    commands = re.findall(r"^ltx2 (.*demo\.safetensors.*)$", page, re.MULTILINE)
    assert len(commands) == 2
    (tmp_path / "docs").symlink_to(ROOT / "docs")  # with the picture that the clip begins with
    monkeypatch.chdir(tmp_path)
    for command, more in zip(commands, (["--preview", "preview.png"], []), strict=True):
        assert run_program(monkeypatch, *shlex.split(command), *more) == 0, capsys.readouterr().err
    made, shipped = (np.asarray(Image.open(file), float) for file in ("demo.png", ROOT / "tools/train_demo/demo.png"))
    assert np.abs(made - shipped).mean() < 1  # of 255: another machine's XLA rounds elsewhere
    check_preview(Path("preview.png"), made)


def check_preview(preview: Path, sheet: np.ndarray) -> None:
    """The last preview has the colours of the clip's six frames, as far as a quarter of a side shows them."""
    colours = [
        np.asarray(
            Image.fromarray(array[-side - GAP : -GAP, GAP:].astype(np.uint8)).resize((6 * 4, 4), Image.Resampling.BOX)
        ).reshape(-1, 3)
        for array, side in ((np.asarray(Image.open(preview).convert("RGB")), LONGER_SIDE), (sheet, 128))
    ]
    assert np.abs(colours[0].astype(float) - colours[1]).mean() < 25  # of 255
