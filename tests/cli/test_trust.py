"""A record may be a stranger's: nothing that it names beyond its model's profile is fetched or read unasked."""

import json
import os
import pty
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from loras import write_header
from ltx2_cli.diffusion.latents import save_latents
from ltx2_cli.media.clip import Media
from ltx2_cli.media.write import write_mp4
from ltx2_cli.request.profiles import read_spec, to_yaml
from ltx2_cli.request.spec import Streams
from ltx2_cli.request.validation import STEERING
from ltx2_cli.request.yaml import parse
from ltx2_cli.weights.digests import digest, header_digest
from program import run_program

Run = Callable[..., tuple[int, str, str]]
NAMES: dict[str, tuple[dict[str, object], str]] = {  # values of a record, and what is said of them
    "checkpoint": ({"checkpoint": "evil/LTX-2"}, "checkpoint evil/LTX-2"),
    "model": ({"model": "evil/LTX-2"}, "checkpoint evil/LTX-2"),
    "encoder": ({"text_encoder": "evil/gemma"}, "text encoder evil/gemma"),
    "denoiser": ({"transformer": "evil/LTX-2/x.gguf"}, "denoiser evil/LTX-2/x.gguf"),
    "lora": ({"lora": ["evil/lora:0.5"]}, "LoRA evil/lora:0.5"),
    "file": ({"lora": ["lora.safetensors"]}, "LoRA lora.safetensors"),
    "upsampler": ({"second_stage.upsampler": "evil/up/x.safetensors"}, "upsampler evil/up/x.safetensors"),
    "second": ({"second_stage.lora": ["evil/l@refs/pr/1"]}, "LoRA of the second stage evil/l@refs/pr/1"),
    "revision": ({"checkpoint": "Lightricks/LTX-2@refs/pr/1"}, "checkpoint Lightricks/LTX-2@refs/pr/1"),
    "picture": ({"conditions": [{"path": "private.png"}]}, "image private.png"),
    "sound": ({"audio": "private.wav"}, "audio private.wav"),
    "noise": ({"initial_noise": "lora.safetensors"}, "noise lora.safetensors"),
}
COMMANDS = {
    "generate": "generate --config clip.mp4",
    "record": "generate --config clip.yaml",
    "batch": "batch jobs --config clip.yaml",
    "sweep": "sweep a --config clip.yaml --vary steps=1,2",
    "replay": "replay clip.yaml",
    "retake": "retake clip.mp4 --from 0 --to 0.2",
    "extend": "extend clip.mp4 --seconds 1",
    "upsample": "upsample latents",
    "decode": "decode latents",
}


def record(provenance: dict[str, object] | None = None, **keys: object) -> str:
    spec = read_spec({"prompt": "a red ball", "model": "demo", "seed": 1, "height": 64, "width": 64, **keys})
    return to_yaml(spec, {"ltx2": "0.1.0", **(provenance or {})})


@pytest.fixture
def ltx2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 64)).save("private.png")
    Path("private.wav").write_bytes(b"RIFF")
    Path("jobs").write_text("a red ball\n")
    write_header(Path("lora.safetensors"), {"proj_in.lora_A.weight": (4, 8), "proj_in.lora_B.weight": (8, 4)})
    return lambda *arguments: (run_program(monkeypatch, *arguments), *capfd.readouterr())


@pytest.mark.parametrize(("keys", "named"), NAMES.values(), ids=NAMES)
def test_what_a_record_names_is_shown_and_not_taken_unasked(ltx2: Run, keys: dict[str, object], named: str):
    Path("clip.yaml").write_text(record(**keys))
    code, _, err = ltx2("generate", "--config", "clip.yaml", "--dry-run")
    assert (code, err.splitlines()) == (
        2,
        [
            f"error: clip.yaml: it may be another's: it names the {named}",
            "hint: --trust takes what it names; `ltx2 info FILE` shows all of it",
        ],
    )
    shown = ltx2("info", "clip.yaml")[1]
    assert named.split()[-1] in shown
    _, _, err = ltx2("generate", "--config", "clip.yaml", "--dry-run", "--trust")
    assert "may be another's" not in err
    assert ltx2("config", "show", "--config", "clip.yaml")[0] == 0


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_command_that_reads_a_record_asks(ltx2: Run, command: str):
    text = record(lora=["evil/lora"])
    Path("clip.yaml").write_text(text)
    frames = np.random.default_rng(0).integers(0, 256, (9, 64, 64, 3), np.uint8)
    write_mp4(Media(frames, np.zeros((9000, 2), np.float32), 24.0, 24000), Path("clip.mp4"), {"record": text})
    arrays = Streams(np.zeros((1, 4, 2, 2, 2), np.float32), np.zeros((1, 2, 9, 4), np.float32))
    save_latents(arrays, Path("latents"), {"fps": "24.0", "record": text})
    before = sorted(Path().iterdir())
    code, out, err = ltx2(*command.split())
    if command.startswith("decode"):  # which adds no LoRA
        assert "another's" not in err
        return
    assert (code, out) == (2, "")
    assert "it may be another's: it names the LoRA evil/lora\n" in err
    assert sorted(Path().iterdir()) == before


def test_what_is_published_here_or_replaced_is_taken(ltx2: Run):
    """Here is a file whose hash, or that of its header, the record states. An illegal length ends each command."""
    lora = Path("lora.safetensors")
    for keys, files, more in (
        ({"model": "ltx2.3", "recipe": "two_stage"}, {}, ()),
        ({"checkpoint": "Lightricks/LTX-2"}, {}, ()),
        ({"lora": [f"{lora}:0.5"]}, {"mine/lora.safetensors": digest(lora)}, ()),
        ({"lora": [str(lora.absolute())]}, {"mine/lora.safetensors": header_digest(lora)}, ()),
        ({"lora": ["gone.safetensors"]}, {}, ()),
        ({"conditions": [{"path": "private.png", "sha256": digest(Path("private.png"))}]}, {}, ()),
        ({"lora": ["evil/lora"]}, {}, ("--set", "lora=[]")),
        ({"model": "evil/LTX-2"}, {}, ("--model", "demo")),
        ({"audio": "private.wav"}, {}, ("--audio", "private.wav")),
    ):
        Path("clip.yaml").write_text(record({"files": files}, **keys))
        _, _, err = ltx2("generate", "--config", "clip.yaml", "--num-frames", "10", *more)
        assert "num_frames 10 is not" in err, keys
    Path("settings.yaml").write_text("model: demo\nlora: [lora.safetensors]\n")
    assert "num_frames 10 is not" in ltx2("generate", "a", "--config", "settings.yaml", "--num-frames", "10")[2]


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 2), ("\n", 2), ("\x04", 2)])
def test_a_terminal_is_asked_once(ltx2: Run, answer: str, code: int, monkeypatch: pytest.MonkeyPatch):
    Path("clip.yaml").write_text(record(conditions=[{"path": "private.png"}]))
    master, slave = pty.openpty()
    with os.fdopen(os.dup(slave), encoding="utf-8") as stdin, os.fdopen(slave, "w", encoding="utf-8") as stderr:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stderr", stderr)
        os.write(master, answer.encode())
        assert ltx2("generate", "--config", "clip.yaml", "--duration", "1s", "--dry-run")[0] == code
        print("end", end="", file=stderr, flush=True)
        said = b""
        while not said.endswith(b"end"):  # a terminal gives what it has, which may be a part
            said += os.read(master, 2**16)
    os.close(master)
    assert said.count(b"it names the image private.png; take it? [y/N]") == 1


STEERING_TEXT = "\x1b]0;own\x07\x1b[2J\x9b31m\x7f\r\u202egpj.exe 雨"
PRINTING = {
    **COMMANDS,
    "info": "info clip.yaml clip.mp4 latents",
    "info json": "info --json clip.yaml clip.mp4 latents",
    "show": "config show --config clip.yaml",
    "show json": "config show --config clip.mp4 --json",
    "validate": "config validate clip.yaml clip.mp4 wrong.yaml",
    "plan": "plan --config clip.yaml",
    "dry": "generate --config clip.yaml --dry-run --trust",
    "dry batch": "batch jobs --config clip.yaml --dry-run --trust",
    "dry sweep": "sweep a --config clip.yaml --vary steps=1,2 --dry-run --trust",
    "gallery": "gallery .",
}


@pytest.mark.parametrize("command", PRINTING.values(), ids=PRINTING)
def test_no_text_of_a_record_steers_a_terminal(ltx2: Run, command: str, monkeypatch: pytest.MonkeyPatch):
    """Nor what a pipe brings to one."""
    keys = {"prompt": STEERING_TEXT, "lora": [f"evil/{STEERING_TEXT}"], "negative_prompt": STEERING_TEXT}
    text = record({"devices": STEERING_TEXT, "files": {STEERING_TEXT: STEERING_TEXT}}, **keys)
    Path("clip.yaml").write_text(text)
    Path("wrong.yaml").write_text(text.replace("model: demo", 'model: "\\e[31mnope"'))
    frames = np.random.default_rng(0).integers(0, 256, (9, 64, 64, 3), np.uint8)
    write_mp4(Media(frames, np.zeros((9000, 2), np.float32), 24.0, 24000), Path("clip.mp4"), {"record": text})
    arrays = Streams(np.zeros((1, 4, 2, 2, 2), np.float32), np.zeros((1, 2, 9, 4), np.float32))
    save_latents(arrays, Path("latents"), {"fps": "24.0", "record": text})
    _, out, err = ltx2(*command.split())
    assert not STEERING.search((out + err).replace("\n", "")), repr(out + err)
    if "json" in command:
        said = json.loads(out)
        assert (said["prompt"]["value"] if "show" in command else said[0]["record"]["prompt"]) == STEERING_TEXT
    if command == PRINTING["show"]:
        assert parse(out)["prompt"] == STEERING_TEXT
