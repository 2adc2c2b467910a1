"""`ltx2 sweep` before its first clip: which combinations there are, and what is wrong with them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ltx2_cli.media.clip import Media
from ltx2_cli.media.write import write_mp4, write_record
from ltx2_cli.request.profiles import read_spec, to_yaml
from program import run_program

DRY = ("--model", "demo", "--dry-run")
Run = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `ltx2 sweep` in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, list[str], str]:
        code = run_program(monkeypatch, "sweep", *arguments)
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return run


def test_a_clip_for_each_combination(sweep: Run) -> None:
    varied = ("--vary", "guidance_scale=2.5,3", "--vary", "steps=4,8", "--seed", "1", "2")
    code, clips, _ = sweep("A fox!", *varied, *DRY)
    names = [
        f"guidance_scale-{scale}-steps-{steps}-seed-{seed}" for scale in (2.5, 3) for steps in (4, 8) for seed in (1, 2)
    ]
    assert (code, clips) == (0, [f"out/a-fox-{name}.mp4" for name in names])
    named = ("-o", "{line}-{steps}-{guidance_scale}-{seed}.mp4")
    assert sweep("A fox!", *varied, *named, *DRY)[1][:3] == ["1-4-2.5-1.mp4", "2-4-2.5-2.mp4", "3-8-2.5-1.mp4"]


def test_a_dry_run_says_what_the_run_would_refuse(sweep: Run) -> None:
    code, clips, err = sweep("a", "--vary", "lora=[gone.safetensors],[]", "--seed", "1", *DRY)
    assert (code, clips) == (5, ["out/a-lora-none-seed-1.mp4"])
    assert "error: 1 failed, 1 to do; line 1: there is no file gone.safetensors\n" in err


def test_any_key_varies(sweep: Run) -> None:
    varied = (
        "--vary",
        "resolution=64p,96p",
        "--vary",
        "stg_blocks=[0],[1, 2]",
        "--vary",
        "second_stage.keep_audio=true",
    )
    _, clips, _ = sweep("a", *varied, "--seed", "1", *DRY)
    assert [clip.removeprefix("out/a-resolution-") for clip in clips] == [
        f"{resolution}-stg_blocks-{blocks}-second_stage.keep_audio-True-seed-1.mp4"
        for resolution in ("64p", "96p")
        for blocks in ("0", "1-2")
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "1 of 2 to 1000 clips are asked for\nhint: for example: --vary guidance_scale=2,3,4"),
        ("--vary fps=1,2 --seed 0..600", "1202 of 2 to 1000 clips are asked for"),
        ("--vary guidance_scale", "--vary 'guidance_scale' is not KEY=VALUE,VALUE..."),
        ("--vary guidance_scale=", "--vary 'guidance_scale=' is not KEY=VALUE,VALUE..."),
        ("--vary guidance_scale={", "--vary 'guidance_scale={' is not KEY=VALUE,VALUE..."),
        ("--vary guidance_scal=1,2", "--vary: unknown option `guidance_scal`; closest: `guidance_scale`"),
        ("--vary steps=1,2 --vary num_inference_steps=3", "--vary: num_inference_steps is given 2 times\nhint: --vary"),
        ("--vary seed=1,2", "--vary: seed is given 2 times\nhint: --seed 0..3"),
        ("--vary height=33,34", "line 1: height 33 is not a multiple of 32"),
        ("--vary steps=1,1", "lines 1 and 2 both make out/a-steps-1-seed-"),
        ("--vary steps=1,2 --sheet mine.png", "mine.png exists"),
        ("--vary steps=1,2 --sheet mine.png --image mine.png --force", "mine.png is read, and would be overwritten"),
        (
            "--vary steps=1,2 --sheet out/clip.mp4",
            "--sheet out/clip.mp4 is not a PNG\nhint: nearest: --sheet out/clip.png",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_made(
    sweep: Run, tmp_path: Path, arguments: str, sentence: str
) -> None:
    Image.new("RGB", (1, 1)).save(tmp_path / "mine.png")
    code, clips, err = sweep("a", "--dry-run", *arguments.split())
    assert (code, clips) == (2, [])
    assert sentence in err


def test_a_sheet_of_what_was_made_before(sweep: Run, tmp_path: Path) -> None:
    """A row for each clip; it is written again, as a sheet and no other picture is."""
    for seed in (1, 2):
        spec = read_spec(prompt="a", seed=seed, output=f"out/a-seed-{seed}.mp4")
        clip = tmp_path / f"out/a-seed-{seed}.mp4"
        clip.parent.mkdir(exist_ok=True)
        write_mp4(Media(np.full((9, 32, 64, 3), 100 * seed, np.uint8), np.empty((0, 2), np.float32), 24.0, 48000), clip)
        write_record(clip.with_suffix(".yaml"), to_yaml(spec))
    assert sweep("a", "--seed", "1", "2")[:2] == (0, [])
    with Image.open(tmp_path / "out/a-sweep.png") as sheet:
        assert sheet.width >= 6 * 64
        rows = [sheet.convert("L").getpixel((20, 26 + 16 + row * (26 + 32))) for row in range(2)]
    assert rows == pytest.approx([100, 200], abs=4)
    assert sweep("a", "--seed", "1", "2", "--sheet", "out/a-sweep.png")[0] == 0
    sheet = (tmp_path / "out/a-sweep.png").read_bytes()
    for other in (("--vary", "steps=4,8", "--seed", "1"), ("--seed", "1", "3")):
        code, _, err = sweep("a", *other, *DRY)
        assert (code, (tmp_path / "out/a-sweep.png").read_bytes()) == (2, sheet)
        assert "error: out/a-sweep.png exists\nhint: --force overwrites it, or name another: --sheet FILE\n" in err
    assert "out/a-sweep.png exists" not in sweep("a", "--seed", "1", "2", "3", *DRY)[2]
    code, _, err = sweep("a", "--seed", "1", "2", "--steps", "3", "--sheet", "other.png")
    assert (code, "and is of another request" in err, (tmp_path / "other.png").exists()) == (2, True, False)
