"""What nobody means is refused in a sentence before anything is loaded, or warned about; nothing is written."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ltx2_cli.plan.request_warnings import request_warnings
from ltx2_cli.request.profiles import read_spec
from program import run_program

VIDEO, AUDIO = (1, 32, 7, 4, 4), (1, 2, 51, 16)  # of the demo's default clip
DEMO = ["--model", "demo"]
GENERATE = ["generate", "--prompt", "a ball", "--dry-run", *DEMO]
LORA = "loras/a.safetensors"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ltx2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the program in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: (run_program(monkeypatch, *arguments), *capsys.readouterr())


REFUSED = {
    "two names": (["-o", "a.mp4", "--output=b.mp4"], "--output is given 2 times: a.mp4, b.mp4\nhint: --output b.mp4"),
    "two configs": (["--config", "a", "--config", "b"], "--config is given 2 times: a, b\nhint: --config b"),
    "two prompts": (["--prompt", "a cat"], "--prompt is given 2 times: a ball, a cat\nhint: --prompt 'a cat'"),
    "seeds one by one": (["--seed", "1", "--seed", "2"], "--seed is given 2 times: 1, 2\nhint: --seed 1,2"),
    "half a range of seeds": (["--seed", "0.."], "`seed` is '0..'; expected 7, 1 2 3 or 0..15"),
    "a LoRA of an unset variable": (["--lora", ""], "lora is empty"),
    "a strength alone": (["--lora", ":0.8"], "the LoRA :0.8 names no file"),
    "an empty upsampler": (["--upsampler", ""], "upsampler is empty"),
    "a device for a profile": (["--sharding", "/dev/null"], "/dev/null is a pipe or a device"),
    "no block": (["--stg-blocks", ""], "stg_blocks '' is not a list of blocks"),
    "a gap in the blocks": (["--stg-blocks", "0,,1"], "stg_blocks '0,,1' is not a list of blocks"),
    "a block twice": (["--stg-blocks", "1,1"], "stg_blocks [1, 1] has a block twice; nearest: --stg-blocks 1"),
    "guidance that overflows": (["--guidance-scale", "1e38"], "guidance_scale 1e+38 is not in -100 to"),
    "more than all contrast": (["--guidance-rescale", "50"], "nearest: --guidance-rescale 1"),
    "never kept": (
        ["--save-run-every", "inf"],
        "--save-run-every 'inf' is not a number of at least 0 and of at most 604800",
    ),
    "no number": (
        ["--save-run-every", "nan"],
        "--save-run-every 'nan' is not a number of at least 0 and of at most 604800",
    ),
    "before it begins": (["--save-run-every", "-1"], "--save-run-every '-1' is not a number of at least 0"),
    "a wait of less than nothing": (
        ["--initialization-timeout", "-1"],
        "--initialization-timeout '-1' is not an integer of at least 1",
    ),
    "programs in a device": (["--compile-cache", "/dev/null"], "cannot write into /dev/null: Not a directory"),
    "text for noise": (["--init-noise", "/etc/passwd"], "/etc/passwd cannot be read as noise: "),
    "zeros for noise": (["--init-noise", "zeros"], "the `video` of the noise file zeros is nearly the same everywhere"),
    "latents for noise": (["--init-noise", "latents"], "latents holds the latents of a clip, no noise"),
    "a checkpoint of torch": (["--model", "./model.ckpt"], "`./model.ckpt` is no .safetensors file"),
    "a deep path": (["-o", "a/" * 3000 + "x.mp4"], "a name of 6005 characters is too long for a file"),
    "a long model": (["--model", "x" * 5000], "a name of 5000 characters is too long for a file"),
    "a name with a NUL": (["--config", "nul.yaml"], "save_latents 'a\\x00b' has a NUL in it; leave it out"),
    "a folder": (["-o", "."], "output '.' is not an mp4; name one: -o video.mp4"),
    "latents without a name": (["--save-latents", ""], "save_latents '.' is a folder; name a file"),
    "more text than is read": (["--set", "max_sequence_length=1025"], "is more than the text encoder's 1024 tokens"),
    "a lost LoRA": (["--lora", "nope.safetensors"], "there is no file nope.safetensors"),
}


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_dry_run_refuses_nonsense_without_output(
    ltx2: Run, arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    Path("model.ckpt").write_text("")
    Path("nul.yaml").write_text('save_latents: "a\\0b"')
    zeros = {"video": np.zeros(VIDEO, np.float32), "audio": np.zeros(AUDIO, np.float32)}
    save_file(zeros, "zeros")
    save_file(
        {name: array + np.arange(array.shape[-1], dtype=np.float32) for name, array in zeros.items()},
        "latents",
        {"stage": "final"},
    )
    before = set(tmp_path.rglob("*"))
    model = [] if "--model" in arguments else DEMO
    code, out, err = ltx2("generate", "--prompt", "a ball", "--dry-run", *model, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.splitlines()) <= 2
    assert len(err) < 2500
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["plan", "--model", "demo", "--lora", "nope.safetensors"], "there is no file nope.safetensors"),
        (["plan", "--height", "64", "--height", "96"], "--height is given 2 times: 64, 96"),
        (["decode", "x", "-o", "a.png", "-o", "b.png", "--fps", "8", "--fps", "9"], "--fps is given 2 times: 8, 9"),
        (["replay", "x.mp4", "--seed", "8", "--seed", "9"], "--seed is given 2 times: 8, 9"),
        (["plan", "--topology", "foo"], "foo is no TPU slice and no GPU"),
        (["plan", "--topology", ":"], ": is no TPU slice and no GPU"),
        (["plan", "--topology", "h1000:8"], "h1000:8 is no TPU slice and no GPU; closest: h100"),
        (["resume", "."], " is a folder, not a file"),
        (["decode", ""], ". is a folder, not a file"),
        (["upsample", ""], ". is a folder, not a file"),
        (["generate", "--config", ".", "--prompt", "rain"], ". is a folder, not a file"),
    ],
)
def test_other_verbs_refuse_nonsense(ltx2: Run, command: list[str], sentence: str) -> None:
    code, out, err = ltx2(*command)
    assert (code, out) == (2, "")
    assert f"{sentence}\nhint: " in err


@pytest.mark.parametrize("verb", ["decode", "upsample"])
def test_the_size_of_saved_latents_cannot_be_changed(ltx2: Run, verb: str) -> None:
    save_file({"video": np.ones(VIDEO, np.float32), "audio": np.ones(AUDIO, np.float32)}, "latents")
    code, out, err = ltx2(verb, "latents", "--model", "demo", "--prompt", "a ball", "--set", "height=64")
    if verb == "decode":
        code, out, err = ltx2(verb, "latents", "--model", "demo", "--set", "height=64")
    assert (code, out, err) == (2, "", "error: latents has a size of its own\nhint: leave --set height out\n")


def test_a_sound_alone_is_not_upsampled(ltx2: Run) -> None:
    save_file({"video": np.ones((*VIDEO[:2], 0, 4, 4), np.float32), "audio": np.ones(AUDIO, np.float32)}, "latents")
    code, out, err = ltx2("upsample", "latents", "--model", "demo", "--prompt", "a ball")
    assert (code, out) == (2, "")
    assert err == "error: latents holds no video to upsample\nhint: `ltx2 decode` writes its audio\n"


def test_a_deleted_folder_is_an_error_of_one_sentence(ltx2: Run, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, out, err = ltx2(*GENERATE)
    assert (code, out, err) == (2, "", "error: the current folder is gone\nhint: cd to one that is there\n")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"lora": [f"{LORA}:1e30"]}, f"the strength 1e+30 of {LORA} is beyond"),
        ({"second_stage.lora": [f"{LORA}:-11"]}, f"the strength -11 of {LORA} is beyond"),
        ({"lora": [LORA] * 50}, f"{LORA} is added 50 times; once is --lora {LORA}"),
        ({"lora": [f"{LORA}:10", "b:-2"]}, ""),
    ],
)
def test_loras_that_nobody_means_are_warned_about(values: dict[str, object], sentence: str) -> None:
    (warning,) = [*request_warnings(read_spec({"prompt": "a ball", "model": "demo", **values}))] or [""]
    assert warning.startswith(sentence) if sentence else not warning


def test_a_dry_run_prints_warnings(ltx2: Run) -> None:
    code, out, _ = ltx2(*GENERATE, "--upsampler", "nope")
    assert code == 0
    assert "note      upsampler changes nothing, there is one stage: --recipe two_stage\n" in out
