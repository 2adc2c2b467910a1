"""What nobody means is refused in a sentence before anything is loaded, or warned about; nothing is written."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ltx2_cli.profiles import read_spec
from ltx2_cli.recipe import complete, ignored
from ltx2_cli.spec import RunSpec
from program import run_program
from tools.train_demo.arch import ARCH

VIDEO, AUDIO = (1, 32, 7, 4, 4), (1, 2, 51, 16)  # of the demo's default clip
GENERATE = ["generate", "--model", "demo", "--prompt", "a ball", "--seed", "1", "--dry-run"]
LORA = "loras/a.safetensors"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ltx2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the program in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: (run_program(monkeypatch, *arguments), *capsys.readouterr())


REFUSED = {
    "half a range of seeds": (["--seed", "0.."], "`seed` is '0..'; expected null or a list, each an integer"),
    "a LoRA of an unset variable": (["--lora", ""], "lora is empty"),
    "a strength alone": (["--lora", ":0.8"], "--lora :0.8 names no file"),
    "an empty upsampler": (["--upsampler", ""], "refinement.upsampler is empty"),
    "a device for a profile": (["--sharding", "/dev/null"], "/dev/null is a pipe or a device"),
    "no block": (["--stg-blocks", ""], "stg_blocks '' is not a list of blocks"),
    "a gap in the blocks": (["--stg-blocks", "0,,1"], "stg_blocks '0,,1' is not a list of blocks"),
    "a block twice": (["--stg-blocks", "1,1"], "stg_blocks [1, 1] has a block twice; nearest: --stg-blocks 1"),
    "guidance that overflows": (["--guidance-scale", "1e38"], "guidance.video.guidance_scale 1e+38 is not in -100 to"),
    "more than all contrast": (["--guidance-rescale", "50"], "nearest: --guidance-rescale 1"),
    "never kept": (["--keep-every", "inf"], "'--keep-every': Input should be less than or equal to 604800"),
    "no number": (["--keep-every", "nan"], "'--keep-every': Input should be less than or equal to 604800"),
    "before it begins": (["--keep-every", "-1"], "'--keep-every': Input should be greater than or equal to 0"),
    "a wait of less than nothing": (
        ["--initialization-timeout", "-1"],
        "'--initialization-timeout': Input should be greater than or equal to 1",
    ),
    "programs in a device": (["--compile-cache", "/dev/null"], "cannot write into /dev/null: Not a directory"),
    "text for noise": (["--noise", "/etc/passwd"], "/etc/passwd cannot be read as noise: "),
    "zeros for noise": (["--noise", "zeros"], "the `video` of the noise file zeros is nearly the same everywhere"),
    "latents for noise": (["--noise", "latents"], "latents holds the latents of a clip, no noise"),
    "a checkpoint of torch": (["--model", "./model.ckpt"], "`./model.ckpt` is no .safetensors file"),
    "a deep path": (["-o", "a/" * 3000 + "x.mp4"], "a name of 6005 characters is too long for a file"),
    "a long model": (["--model", "x" * 5000], "a name of 5000 characters is too long for a file"),
    "a folder": (["-o", "."], "output '.' is not an mp4; name one: -o video.mp4"),
    "latents without a name": (["--save-latents", ""], "save_latents '.' is a folder; name a file"),
    "more text than is read": (["--set", "max_sequence_length=1025"], "is more than the text encoder's 1024 tokens"),
    "a lost LoRA": (["--lora", "nope.safetensors"], "there is no file nope.safetensors"),
}


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_dry_run_refuses_it_and_prints_nothing_before(
    ltx2: Run, arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    Path("model.ckpt").write_text("")
    zeros = {"video": np.zeros(VIDEO, np.float32), "audio": np.zeros(AUDIO, np.float32)}
    save_file(zeros, "zeros")
    save_file(
        {name: array + np.arange(array.shape[-1], dtype=np.float32) for name, array in zeros.items()},
        "latents",
        {"stage": "final"},
    )
    before = set(tmp_path.rglob("*"))
    code, out, err = ltx2(*GENERATE, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.splitlines()) == 2
    assert len(err) < 2500
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["plan", "--model", "demo", "--lora", "nope.safetensors"], "there is no file nope.safetensors"),
        (["plan", "--topology", "foo"], "foo is no TPU slice"),
        (["plan", "--topology", ":"], ": is no TPU slice"),
        (["plan", "--topology", "h100:8"], "h100:8 is no TPU slice"),
        (["resume", "."], " is a folder, not a file"),
        (["decode", ""], ". is a folder, not a file"),
        (["upsample", ""], ". is a folder, not a file"),
        (["generate", "--config", ".", "--prompt", "rain"], ". is a folder, not a file"),
    ],
)
def test_other_verbs_refuse_it(ltx2: Run, command: list[str], sentence: str) -> None:
    code, out, err = ltx2(*command)
    assert (code, out) == (2, "")
    assert f"{sentence}\nhint: " in err


@pytest.mark.parametrize("verb", ["decode", "upsample"])
def test_the_size_of_latents_is_theirs(ltx2: Run, verb: str) -> None:
    save_file({"video": np.ones(VIDEO, np.float32), "audio": np.ones(AUDIO, np.float32)}, "latents")
    code, out, err = ltx2(verb, "latents", "--model", "demo", "--prompt", "a ball", "--set", "height=64")
    if verb == "decode":
        code, out, err = ltx2(verb, "latents", "--model", "demo", "--set", "height=64")
    assert (code, out, err) == (2, "", "error: latents has a size of its own\nhint: leave --set height out\n")


def test_a_folder_that_is_gone_is_a_sentence(ltx2: Run, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, out, err = ltx2(*GENERATE)
    assert (code, out, err) == (2, "", "error: the current folder is gone\nhint: cd to one that is there\n")


def asked(**values: object) -> RunSpec:
    return complete(read_spec({"prompt": "a ball", "model": "demo", **values}), ARCH)


WARNED = [
    ({"lora": [f"{LORA}:1e30"]}, None, f"the strength 1e+30 of {LORA} is beyond"),
    ({"refinement.lora": [f"{LORA}:-11"], "recipe": "two_stage"}, 1, f"the strength -11 of {LORA} is beyond"),
    ({"lora": [LORA] * 50}, None, f"{LORA} is added 50 times; once is --lora {LORA}"),
    ({"refinement.upsampler": "nope"}, None, "the upsampler nope is not used, there is one stage"),
    ({"refinement.lengthen": True}, None, "nothing is lengthened, there is one stage"),
    ({"refinement.lengthen": True}, 1, "nothing is lengthened, the upsampler leaves time as it is"),
]


@pytest.mark.parametrize(("values", "time", "sentence"), WARNED)
def test_what_changes_nothing_or_too_much_is_warned_about(
    values: dict[str, object], time: int | None, sentence: str
) -> None:
    (warning,) = ignored(asked(**values), ARCH, time)
    assert warning.startswith(sentence)


@pytest.mark.parametrize(
    ("values", "time"),
    [
        ({}, None),
        ({"lora": [f"{LORA}:10", "b:-2"]}, None),
        ({"refinement.lengthen": True}, 2),
        ({"refinement.upsampler": "a"}, 1),
    ],
)
def test_what_may_be_meant_is_not(values: dict[str, object], time: int | None) -> None:
    assert list(ignored(asked(**values), ARCH, time)) == []


def test_a_dry_run_warns(ltx2: Run) -> None:
    code, out, _ = ltx2(*GENERATE, "--upsampler", "nope")
    assert code == 0
    assert "warning   the upsampler nope is not used, there is one stage: --recipe two_stage\n" in out
