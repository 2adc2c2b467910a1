"""`ltx2 retake` and `ltx2 extend`: what they ask for, of clips with a record and without."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ltx2_cli.errors import UsageError
from ltx2_cli.media.clip import Media
from ltx2_cli.media.write import write_mp4
from ltx2_cli.plan.resolve import resolve
from ltx2_cli.request import size
from ltx2_cli.request.profiles import read_spec, to_yaml
from ltx2_cli.request.spec import ConditionSpec, RunSpec
from ltx2_cli.request.yaml import dump, parse
from ltx2_cli.runs import edit
from media.test_videos import ffmpeg, write_lossless
from program import run_program
from sounds import tone

Asks = Callable[..., RunSpec | str]
FRAMES = np.zeros((49, 64, 96, 3), np.uint8)
RECORD = {"prompt": "a fox", "model": "demo", "recipe": "one_stage", "num_inference_steps": 3, "seed": 7}


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """49 frames at 24 a second, 2.04 s, with a record."""
    spec = read_spec(RECORD, num_frames=49, height=64, width=96, negative_prompt="blur", lora=["style.safetensors"])
    spec = replace(spec, num_videos=1, conditions=(ConditionSpec(__file__),))
    path = tmp_path_factory.mktemp("clips") / "fox.mp4"
    record = to_yaml(spec, {"ltx2": "0", "devices": "none"})
    write_mp4(Media(FRAMES, tone(2, 16000), 24.0, 16000), path, {"record": record})
    return path


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Asks:
    """The request that a command asks for, or the sentence with which it is refused."""
    asked = list[RunSpec]()

    def make(session: Any, spec: RunSpec, *more: object) -> None:
        asked.append(spec)

    def run(*arguments: object) -> RunSpec | str:
        code = run_program(monkeypatch, *map(str, arguments))
        assert code == (0 if asked else 2)
        return asked.pop() if asked else capsys.readouterr().err

    monkeypatch.setattr(edit, "make", make)
    return run


def test_a_retake_asks_for_what_the_record_says_and_a_new_seed(asks: Asks, clip: Path) -> None:
    spec = asks("retake", clip, "--from", "0.5s", "--to", "1.01", "--steps", "5")
    assert isinstance(spec, RunSpec)
    assert spec.conditions == (ConditionSpec(str(clip), kind="clip", regenerate=(12, 25), streams="both"),)
    assert (spec.prompt, spec.negative_prompt, spec.model) == ("a fox", "blur", "demo")
    assert (spec.width, spec.height, spec.num_frames, spec.fps) == (96, 64, 49, 24.0)
    assert (spec.num_inference_steps, spec.seed, spec.lora) == (5, None, ("style.safetensors",))
    assert spec.output is None  # it is named as below


@pytest.mark.parametrize(
    ("flags", "streams"),
    [(["--video"], "video"), (["--audio"], "audio"), (["--both"], "both"), (["--audio", "--video"], "both")],
)
def test_a_retake_may_be_of_one_stream(asks: Asks, clip: Path, flags: list[str], streams: str) -> None:
    spec = asks("retake", clip, "--from", "0", "--to", "1", *flags, "--seed", "1 2", "-o", "new.mp4")
    assert isinstance(spec, RunSpec)
    assert (spec.conditions[0].streams, spec.seed, spec.output) == (streams, (1, 2), "new.mp4")


@pytest.mark.parametrize(
    ("part", "regenerate"),
    [
        ([], (0, 49)),
        (["--from", "1s"], (24, 49)),
        (["--to", "1s"], (0, 24)),
        (["--from", "1s", "--to", "2s"], (24, 48)),
    ],
)
def test_a_retake_of_a_noise_level_is_of_all_that_no_time_excludes(
    asks: Asks, clip: Path, part: list[str], regenerate: tuple[int, int]
) -> None:
    spec = asks("retake", clip, *part, "--noise-level", "0.9")
    assert isinstance(spec, RunSpec)
    wanted = ConditionSpec(str(clip), kind="clip", regenerate=regenerate, noise_level=0.9)
    assert (spec.conditions, spec.num_frames) == ((wanted,), 49)


@pytest.mark.parametrize("stream", ["video", "audio"])
def test_a_whole_stream_is_made_for_the_other(asks: Asks, clip: Path, stream: str) -> None:
    spec = asks("retake", clip, f"--{stream}")
    assert isinstance(spec, RunSpec)
    assert spec.conditions == (ConditionSpec(str(clip), kind="clip", regenerate=(0, 49), streams=stream),)


@pytest.mark.parametrize(("level", "nearest"), [("0", "0.01"), ("nan", "0.01"), ("2", "1")])
def test_a_noise_level_is_above_0_and_at_most_1(asks: Asks, clip: Path, level: str, nearest: str) -> None:
    refused = str(asks("retake", clip, "--noise-level", level))
    assert f"--noise-level {level} is not in 0.01 to 1; nearest: --noise-level {nearest}" in refused


def test_a_retake_says_what_it_keeps(asks: Asks, clip: Path) -> None:
    refused = str(asks("retake", clip))
    assert "would be made anew, which keeps nothing of it" in refused
    assert "hint: --noise-level 0.9, or a part: --from 0s --to 1s" in refused
    assert "lasts 2.04 s, and 3 to 2.042 s are to be regenerated" in str(asks("retake", clip, "--from", "3s"))


@pytest.mark.parametrize(
    ("seconds", "more", "num_frames", "shown", "end"),
    [
        ("1s", [], 41, 17, 73),
        ("19s", [], 473, 17, 505),
        ("0.5s", ["--num-frames", "25"], 25, 9, 61),  # 12 frames, in whole latents 16
    ],
)
def test_a_clip_goes_on_behind_its_end(
    asks: Asks, clip: Path, seconds: str, more: list[str], num_frames: int, shown: int, end: int
) -> None:
    spec = asks("extend", clip, "--seconds", seconds, *more)
    assert isinstance(spec, RunSpec)
    assert spec.conditions == (ConditionSpec(str(clip), kind="clip", num_frames=shown, regenerate=(49, end)),)
    assert spec.num_frames == num_frames


@pytest.mark.parametrize(
    ("seconds", "more", "sentence"),
    [
        ("0.01s", [], "--seconds 0.01s is less than a frame"),
        ("20", [], "behind the 0.71 s that it begins with\nhint: extend twice; at most --seconds 19.33s at a time"),
        ("1s", ["--num-frames", "25"], "extend twice; at most --seconds 0.66s at a time"),
    ],
)
def test_no_extension_is_shorter_than_a_frame_or_longer_than_a_clip(
    asks: Asks, clip: Path, seconds: str, more: list[str], sentence: str
) -> None:
    assert sentence in str(asks("extend", clip, "--seconds", seconds, *more))


def dry_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *typed: object) -> str:
    assert run_program(monkeypatch, *map(str, typed), "--dry-run") == 0
    return capsys.readouterr().out


def test_a_second_edit_of_a_clip_has_another_name(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the clip; by the seed, or a number."""
    path = shutil.copy(clip, tmp_path / "fox.mp4")
    model = ("--set", "lora=[]", "--model", "demo")
    retake = (capsys, monkeypatch, "retake", path, "--from", "0", "--to", "1", *model)
    for seeds, names in (("7", ["7"]), ("8", ["8"]), ("7,9", ["7", "9"])):
        lines = dry_run(*retake, "--seed", seeds).splitlines()
        written = [line.split()[1] for line in lines if line.startswith("write") and line.endswith(".mp4")]
        assert written == [str(tmp_path / f"fox-retake-s{name}.mp4") for name in names]
    (tmp_path / "fox-retake-s7.mp4").touch()
    assert f"{tmp_path}/fox-retake-s7-2.mp4" in dry_run(*retake, "--seed", "7")
    extend = ("extend", path, "--seconds", "0.1", "--seed", "7", *model)
    assert f"{tmp_path}/fox-extended-s7.mp4" in dry_run(capsys, monkeypatch, *extend)


def test_no_length_is_named_that_a_clip_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 48 frames none are made as 49, and what they are made as is said where the demo did not learn so many."""
    path = write_lossless(tmp_path / "two-seconds.mov", FRAMES[:48])
    typed = ("--model", "demo", "--prompt", "a red ball")
    for command in (("retake", path, "--from", "0.5", "--to", "1", "--video"), ("extend", path, "--seconds", "1")):
        assert "trained on clips of" not in dry_run(capsys, monkeypatch, *command, *typed)
    longer = dry_run(capsys, monkeypatch, "extend", path, "--seconds", "3", *typed)
    assert "the model was trained on clips of 49 frames, not of 89\n" in longer


def recorded(folder: Path, **values: object) -> Path:
    """A clip whose record says this too."""
    record = to_yaml(read_spec(RECORD, height=64, width=96), {"ltx2": "0", "devices": "none"})
    write_mp4(
        Media(FRAMES, tone(2, 16000), 24.0, 16000),
        path := folder / "clip.mp4",
        {"record": dump({**parse(record), **values})},
    )
    return path


def test_what_a_clip_was_given_is_its_own(asks: Asks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sound is in the file, and a picture that it showed. The rate in a record may be a stranger's."""
    shown = [{"path": "gone.png"}]
    path = recorded(
        tmp_path, audio={"path": "song.wav"}, reference_strength=0.5, streams="video", fps="24", conditions=shown
    )
    monkeypatch.setenv("LTX2_IMAGE_CRF", "0")
    spec = asks("retake", path, "--from", "0", "--to", "1")
    assert isinstance(spec, RunSpec)
    assert (spec.audio, spec.reference_strength, spec.streams, spec.fps) == (None, 1, "both", 24)
    assert [condition.kind for condition in spec.conditions] == ["clip"]
    assert spec.image_crf == 0


def test_a_retake_follows_the_references_of_the_clip(asks: Asks, tmp_path: Path) -> None:
    """Unless other LoRAs are asked for; what goes on behind the clip has none."""
    given = [{"path": __file__, "kind": kind} for kind in ("image", "reference", "mask")]
    path = recorded(tmp_path, conditions=given, reference_strength=0.5, lora=["ic-lora.safetensors"])
    interval = ("retake", path, "--from", "0", "--to", "1", "--trust")
    for other, kinds, strength in (((), ["clip", "reference", "mask"], 0.5), (("--set", "lora=[]"), ["clip"], 1)):
        spec = asks(*interval, *other)
        assert isinstance(spec, RunSpec)
        assert ([condition.kind for condition in spec.conditions], spec.reference_strength) == (kinds, strength)
    said = str(asks("extend", path, "--seconds", "1"))
    assert f"{path} followed references, which end with it, by an in-context LoRA\nhint: --set lora=[] goes on" in said
    assert isinstance(asks("extend", path, "--seconds", "1", "--lora", "style.safetensors"), RunSpec)


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        (("--fps", "-5"), "fps -5 is not in 1 to 240; nearest: --fps 1"),
        (("--fps", "nan"), "fps nan is not in 1 to 240; nearest: --fps 1"),
        (("--set", "fps=12"), "was read at 24 frames a second\nhint: --fps 12 in place of --set"),
    ],
)
def test_a_rate_is_legal_and_that_of_the_interval(
    asks: Asks, clip: Path, typed: tuple[str, str], sentence: str
) -> None:
    assert sentence in str(asks("retake", clip, "--from", "0", "--to", "1", *typed))


def test_variables_that_are_read_are_named(
    asks: Asks, clip: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LTX2_IMAGE_CRF", "0")
    assert isinstance(asks("extend", clip, "--seconds", "1"), RunSpec)
    assert "from the environment: LTX2_IMAGE_CRF" in capsys.readouterr().err


def test_a_clip_without_a_record_needs_a_prompt_and_a_model(asks: Asks, tmp_path: Path) -> None:
    path = write_lossless(tmp_path / "v.mov", FRAMES[:12], 12)
    assert f"{path} does not say what made it" in str(asks("retake", path, "--from", "0", "--to", "0.5"))
    spec = asks("retake", path, "--from", "0", "--to", "0.5", "--video", "--prompt", "rain", "--model", "demo")
    assert isinstance(spec, RunSpec)
    assert (spec.prompt, spec.model, spec.fps, spec.num_frames) == ("rain", "demo", 12, 9)
    assert spec.conditions[0].regenerate == (0, 6)
    assert f"{path} has no audio to retake" in str(asks("retake", path, "--from", "0", "--to", "0.5", "--prompt", "a"))


@pytest.mark.parametrize(
    ("start", "stop", "sentence", "hint"),
    [
        ("1.5", "1", "--from 1.5s is not before --to 1s", "--from 1s --to 1.5s"),
        ("1", "1", "--from 1s is not before --to 1s", "--from 1s --to 1.33333s"),
        ("1", "2.5", "lasts 2.04 s, and 1 to 2.5 s are to be regenerated", "nearest: --from 1.00s --to 2.04s"),
        ("3", "4", "lasts 2.04 s, and 3 to 4 s are to be regenerated", "nearest: --from 2.00s --to 2.04s"),
        ("soon", "4", "--from 'soon' is not like 5s", "for example: --from 5s"),
    ],
)
def test_an_interval_that_a_clip_does_not_have_is_refused(
    asks: Asks, clip: Path, start: str, stop: str, sentence: str, hint: str
) -> None:
    said = str(asks("retake", clip, "--from", start, "--to", stop))
    assert sentence in said
    assert hint in said


def test_a_retake_sees_as_much_of_a_clip_as_models_were_trained_on(
    asks: Asks, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of 49 frames, those that are named, or 20 s, here one."""
    interval = ("retake", clip, "--from", "0.5", "--to", "1")
    seen = [asks(*interval), asks(*interval, "--num-frames", "33")]
    monkeypatch.setattr(size, "LONGEST_SECONDS", 1)
    seen.append(asks(*interval))
    assert [isinstance(spec, RunSpec) and spec.num_frames for spec in seen] == [49, 33, 25]


def test_a_size_that_no_model_makes_is_refused(asks: Asks, clip: Path, tmp_path: Path) -> None:
    ffmpeg("-i", clip, "-vf", "scale=100:64", path := tmp_path / "v.mp4")
    said = str(asks("extend", path, "--seconds", "1", "--prompt", "rain"))
    assert "is 100x64, and models make sides that are multiples of 32" in said
    assert "hint: --set width=96 edits its middle" in said


def test_the_middle_of_a_clip_is_edited(asks: Asks, tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (9, 72, 100, 3), np.uint8)
    path = write_lossless(tmp_path / "v.mov", frames)
    retake = ("retake", path, "--from", "0", "--to", "0.2", "--prompt", "rain", "--model", "demo", "--video")
    spec = asks(*retake, "--set", "width=96", "--set", "height=64")
    assert isinstance(spec, RunSpec)
    plan = resolve(spec)
    np.testing.assert_array_equal(plan.input_videos[0].frames, frames[:, 4:68, 2:98])
    assert any(f"{path}: its middle 96x64 is edited" in warning for warning in plan.warnings)
    with pytest.raises(UsageError, match=r"is 100x72, and a clip of 32x64 is asked for$"):
        resolve(replace(spec, width=32))


def test_a_clip_that_is_not_there_is_refused(asks: Asks) -> None:
    assert "there.mp4 cannot be read" in str(asks("extend", "there.mp4", "--seconds", "1"))
