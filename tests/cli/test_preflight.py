"""A request that does not fit: exit code 3 before anything is downloaded or loaded, and a command that then passes."""

import ast
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from devices import cpu
from ltx2_cli import Media, chips, load, resolve, write_mp4
from ltx2_cli.chips import Chip
from ltx2_cli.cli.command_line import command_line
from ltx2_cli.core.components import Components
from ltx2_cli.diffusion.latents import save_latents
from ltx2_cli.errors import DoesNotFitError
from ltx2_cli.estimate.alternatives import Alternative
from ltx2_cli.plan.resolve import plan_offline
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.request.spec import Streams
from program import run_program

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ltx2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`ltx2` in an empty folder, with nothing in the hub's cache, which may not load: exit code, stdout, stderr."""

    def load(*_: object) -> None:
        raise AssertionError("nothing is loaded")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(Components, "_loaded", load)
    return lambda *arguments: (run_program(monkeypatch, *arguments), *capsys.readouterr())


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets what each device has, in bytes."""

    def sets(size: float) -> None:
        monkeypatch.setattr(chips, "CHIPS", (Chip("tiny", ("cpu",), size, 1e12, 1e12, 1e12),))

    return sets


def hinted(err: str) -> list[str]:
    """The words of the command that an error suggests."""
    command = err[err.index("ltx2 generate") :].splitlines()[0]
    return shlex.split(command)[1:]


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_published_model_is_refused_before_its_download(ltx2: Run, memory, dry: list[str]) -> None:
    memory(16e9)
    code, out, err = ltx2("generate", "--model", "ltx2", "--prompt", "a fox, at dawn", *dry)
    assert (code, out) == (3, "")
    assert "error: this does not fit: to denoise takes about " in err
    assert "hint: it takes a device with " in err
    assert hinted(err) == ["generate", "--prompt", "a fox, at dawn", "--model", "demo"]
    code, out, err = ltx2(*hinted(err), "--dry-run")
    assert (code, err) == (0, "")


@pytest.mark.parametrize("model", ["ltx2.3", "someone/model"])
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--lora", "style.safetensors:0.8"], "there is no file style.safetensors\n"),
        (["--lora", "cut.safetensors"], "cut.safetensors"),
        (["--image", "cut.png"], "cut.png"),
        (["--audio", "cut.wav"], "cut.wav"),
    ],
)
def test_local_files_are_refused_before_the_hub_is_asked(
    ltx2: Run, memory, monkeypatch: pytest.MonkeyPatch, model: str, given: list[str], sentence: str
) -> None:
    memory(1e15)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for kind in ("safetensors", "png", "wav"):
        Path(f"cut.{kind}").write_bytes(b"cut")
    code, out, err = ltx2("generate", "a fox", "--model", model, *given)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert sentence in err
    assert "hub" not in err
    assert ltx2("generate", "a fox", "--model", model)[2].startswith("error: ")


def test_a_clip_that_is_too_large_is_refused_with_one_that_fits(ltx2: Run, memory) -> None:
    memory(0.3e9)
    asked = ["generate", "--model", "demo", "--prompt", "a fox", "--num-frames=249", "--set", "width=256"]
    code, out, err = ltx2(*asked, "--set", "height=256")
    assert (code, out) == (3, "")
    suggested = hinted(err)
    assert suggested[:5] == asked[:5]
    assert "--num-frames=249" not in suggested
    assert 9 < int(suggested[suggested.index("--num-frames") + 1]) < 249
    code, _, err = ltx2(*suggested, "--dry-run")
    assert (code, err) == (0, "")
    assert list(Path().glob("**/*.mp4")) == []


def test_the_library_refuses_as_the_command_does(ltx2: Run, memory) -> None:
    """What it suggests can be loaded."""
    memory(130e6)
    _, _, err = ltx2("generate", "--model", "demo", "--prompt", "a ball", "--set", "keep_resident=true")
    asked = {"model": "demo", "prompt": "a ball", "keep_resident": True}
    with pytest.raises(DoesNotFitError) as refused:
        load(resolve(read_spec(asked)))
    assert err.startswith(f"error: {refused.value}\n")
    smaller = ast.literal_eval(re.fullmatch(r"read_spec\(\.\.\., dotlist=(.*)\)", refused.value.hint)[1])
    assert load(resolve(read_spec(asked, dotlist=smaller)))
    write_mp4(Media(np.zeros((9, 32, 32, 3), np.uint8), np.zeros((16000, 2), np.float32), 24, 16000), Path("a.mp4"))
    assert Path("a.mp4").stat().st_size


@pytest.fixture
def latents(tmp_path: Path) -> str:
    """Those of the embedded model's clip, as arrays alone."""
    shapes = plan_offline(read_spec(prompt="a", model="demo"), cpu()).latent_shapes
    save_latents(Streams(*(np.zeros(shape, np.float32) for shape in shapes)), path := tmp_path / "clip.safetensors", {})
    return str(path)


@pytest.mark.parametrize(("verb", "phase"), [("decode", "decode"), ("upsample", "")])
def test_an_upsampled_clip_that_is_too_large_is_refused_too(
    ltx2: Run, memory, latents: str, verb: str, phase: str
) -> None:
    """Its size is that of the latents: no other is suggested."""
    memory(10e6)
    prompt = ["--prompt", "a fox"] if verb == "upsample" else []
    code, out, err = ltx2(verb, latents, "--model", "demo", *prompt)
    assert (code, out) == (3, "")
    assert f"error: this does not fit: to {phase}" in err
    assert "hint: it takes a device with " in err
    assert "--num-frames" not in err


@pytest.mark.parametrize(
    ("typed", "alternative", "expected"),
    [
        ("generate --num-frames 257 --seed 1 2", {"num_frames": "121"}, "ltx2 generate --seed 1 2 --num-frames 121"),
        ("generate --duration 11s", {"num_frames": "121"}, "ltx2 generate --num-frames 121"),
        (
            "generate --aspect=16:9 --resolution 720p --seed 1",
            {"width": "768", "height": "448"},
            "ltx2 generate --seed 1 --width 768 --height 448",
        ),
        ("generate --num-frames=257", {"num_frames": "121"}, "ltx2 generate --num-frames 121"),
        ("generate --set num_frames=257", {"num_frames": "121"}, "ltx2 generate --num-frames 121"),
        (
            "generate --set=keep_resident=true --set fps=30",
            {"keep_resident": "false"},
            "ltx2 generate --set fps=30 --set keep_resident=false",
        ),
        ("generate --num-outputs-per-prompt 4", {"num_videos": "1"}, "ltx2 generate --num-videos 1"),
        ("resume 'a fox.run'", {"sharding": "auto"}, "ltx2 resume 'a fox.run' --sharding auto"),
        ("bench run --num-frames 257", {"model": "demo"}, "ltx2 bench run --num-frames 257 --model demo"),
        ("decode x --sharding single", {"sharding": "auto"}, "ltx2 decode x --sharding auto"),
    ],
)
def test_the_suggested_command_repeats_the_typed_one(
    typed: str, alternative: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["ltx2", *shlex.split(typed)])
    assert command_line(Alternative({}, alternative)) == expected


def test_a_larger_gpu_fraction_is_suggested_as_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ltx2", "generate", "--prompt", "a fox"])
    command = command_line(Alternative(most_memory=True))
    assert command == "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 ltx2 generate --prompt 'a fox'"
