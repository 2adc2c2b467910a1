"""Every option that a message names is an option of the command that was typed, or was typed."""

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ltx2_cli
from ltx2_cli.cli.app import ltx2_command
from ltx2_cli.cli.command_line import command_line
from ltx2_cli.cli.registry import COMMANDS, spelling_of
from ltx2_cli.diffusion.latents import save_latents
from ltx2_cli.estimate.alternatives import Alternative
from ltx2_cli.media.clip import Media
from ltx2_cli.media.write import write_mp4, write_wav
from ltx2_cli.parallel.devices import install_command
from ltx2_cli.request.environment import read_environment
from ltx2_cli.request.profiles import merge_layers, profile_layers, read_spec, to_yaml
from ltx2_cli.request.spec import Streams
from ltx2_cli.request.spelling import GENERATE, NAMES
from ltx2_cli.request.yaml import dump, key_lines
from program import run_program
from sounds import tone

FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")
ELSEWHERE = re.compile(r"`?ltx2 ([a-z ]*[a-z])([^`;,]*)")  # another command that a message names, with its options
FILES = {  # words that a command needs
    "retake": ["clip.mp4", "--from", "0", "--to", "1"],
    "extend": ["clip.mp4", "--seconds", "1"],
    "batch": ["jobs.txt"],
    "sweep": ["a ball", "--vary", "steps=1,2"],
    "generate": ["a ball"],
    "upsample": ["latents.safetensors"],
    "decode": ["latents.safetensors"],
    "replay": ["record.yaml"],
    "resume": ["absent.run"],
    "info": ["text.txt"],
    "gallery": ["text.txt"],
    "config validate": ["wrong.yaml"],
}
WRONG: dict[str, Any] = {  # values by their key, that are of the right type
    "height": 100,
    "width": 100,
    "num_frames": 20,
    "fps": 0.5,
    "num_videos": 0,
    "seed": "3,3",
    "num_inference_steps": 0,
    "stg_blocks": [1, 1],
    "guidance_interval": [1, 0],
    "stg_every": 0,
    "modality_every": 0,
    "image_crf": 99,
    "keyframes": -1,
    "keyframe_segments": [12],
    "loudness": 3,
    "nag_scale": 0,
    "nag_tau": 0,
    "nag_alpha": 2,
    "image_strength": 1.5,
    "reference_strength": 0.5,
    "prompt": " ",
    "output": "clip.avi",
    "initial_noise": "absent",
    "audio": "absent.wav",
    "lora": [":0.8"],
    "max_sequence_length": 0,
    "vae_memory_gb": 0,
    "schedule_tokens": 0,
    "segment_fade": -1,
    "windows": 0,
    "first_block_cache": -1,
    "window_overlap": -1,
    "second_stage.upsampler": "",
    "second_stage.sampler": "eular",
    "second_stage.sigmas": [1.0],
    "model_name": "a/b",
    "save_latents": "",
    **{f"guidance.{stream}.guidance_scale": 1e9 for stream in Streams._fields},
}
TYPED = {  # what else may be typed wrong; of `generate`, and of each command that takes it
    "--image": ["a.png@900", "b.png@0:7", "absent.png", ""],
    "--reference": ["text.txt:5"],
    "--reference-mask": ["absent.png"],
    "--model": ["dmo", "./absent"],
    "--recipe": ["destilled"],
    "--sharding": ["gpuu", "./absent.yaml"],
    "--lora": ["absent.safetensors", "a:x"],
    "--config": ["absent.yaml", "text.txt"],
    "--set": ["heigth=3", "height", "height=tall", "sharding.attention=foo", "streams=audio", "text_encoder=x"],
    "--output": ["text.txt", "/dev/null/a.mp4", "."],
    "--aspect": ["9"],
    "--resolution": ["big"],
    "--duration": ["long"],
    "--shard": ["4/2"],
    "--vary": ["heigth=3", "steps"],
    "--topology": ["v9:2x2"],
    "--save-latents": ["/dev/null/a.safetensors"],
    "--perf-dump": ["/dev/null/p.json"],
    "--process-id": ["3"],
    "--compile-cache": ["/dev/null"],
    "--seed": ["abc"],
    "--height": ["tall"],
    "--seconds": ["none"],
    "--from": ["later"],
}

Said = Callable[..., str]


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """What a command says in a folder with a file of each kind."""
    monkeypatch.chdir(tmp_path)
    record = to_yaml(
        read_spec(prompt="a ball", model="demo", seed=1, height=128, width=128, num_frames=49), {"ltx2": "0"}
    )
    media = Media(np.zeros((49, 128, 128, 3), np.uint8), tone(2, 16000), 24.0, 16000)
    write_mp4(media, Path("clip.mp4"), {"record": record})
    write_wav(media, Path("sound.wav"))
    arrays = Streams(np.ones((1, 32, 7, 4, 4), np.float32), np.ones((1, 2, 51, 16), np.float32))
    save_latents(arrays, Path("latents.safetensors"), {"record": record, "stage": "stage1"})
    save_file({"video": arrays.video, "audio": arrays.audio}, "bare.safetensors")
    Path("record.yaml").write_text(record)
    Path("jobs.txt").write_text("a ball\n")
    Path("text.txt").write_text("text")
    Path("wrong.yaml").write_text(dump(WRONG))

    def run(*words: str) -> str:
        run_program(monkeypatch, *words)
        return "".join(capsys.readouterr())

    return run


@cache
def options_of(command: str) -> set[str]:
    """Every option of a command."""
    found: Any = ltx2_command()
    for word in command.split():
        found = found.commands[word]
    return {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def strangers(command: str, words: list[str], message: str) -> list[str]:
    """Options in a message that are none of the command's, of another command that it names, of pip, or typed."""
    message = re.sub(r"\S+ …", "", message.replace(install_command("[tpu]"), ""))  # a long message is cut in the middle
    for word in sorted(words, key=len, reverse=True):
        message = message.replace(word, "").replace(shlex.quote(word), "")
    found = list[str]()
    for match in ELSEWHERE.finditer(message):
        other = next((name for name in COMMANDS if f"{match[1]} ".startswith(f"{name} ")), None)
        if other:
            found += set(FLAG.findall(match[2])) - options_of(other)
            message = message.replace(match[0], "")
    return [*found, *(set(FLAG.findall(message)) - options_of(command))]


def as_typed(option: str, value: Any) -> list[str]:
    items = value if option == "--lora" else [",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return [f"{option}={item}" for item in items]


def wrong_requests(command: str) -> Iterator[list[str]]:
    """Words for a command, each with something wrong."""
    spelling, own, words = spelling_of(COMMANDS[command].options), options_of(command), FILES.get(command, [])
    if given := [(spelling.options[key], value) for key, value in WRONG.items() if key in spelling.options]:
        yield [*words, *(word for option, value in given for word in as_typed(option, value))]
    if "--set" in own:
        yield [
            *words,
            *(word for key, value in WRONG.items() for word in ("--set", f"{key}={dump({'x': value})[3:-1]}")),
        ]
    if "--config" in own:
        yield [*words, "--config", "wrong.yaml"]
    again = {
        "--model",
        "--recipe",
        "--sharding",
        "--perf-dump",
        "--process-id",
        "--compile-cache",
        "--seed",
        "--output",
    }
    once = again if command in ("retake", "extend") else set()  # each reads its clip anew; the code is that of others
    right = {"streams=audio"} if command == "bench run" else set()  # it takes random weights, and would measure them
    typed = {option: [text for text in TYPED[option] if text not in right] for option in (own & TYPED.keys()) - once}
    yield from ([*words, f"{option}={text}"] for option, texts in typed.items() for text in texts)
    yield [*words, "--nonsense"]
    yield [*words, *words, "more"]
    if words:
        yield []


@pytest.mark.parametrize("command", COMMANDS)
def test_messages_name_the_options_of_their_command(said: Said, command: str) -> None:
    wrong = {}
    for words in wrong_requests(command):
        if found := strangers(command, words, message := said(*command.split(), *words)):
            wrong[shlex.join(words)] = found, message
    assert wrong == {}


def test_what_was_typed_is_said_as_it_was(said: Said) -> None:
    assert "error: No such option: --width\n" in said("decode", "latents.safetensors", "--width", "64")
    path = "no --width 64 or --steps 3.safetensors"
    assert path in said("decode", path)
    assert path in said("upsample", "latents.safetensors", "--set", f"initial_noise={path}")


def test_every_name_of_an_option_is_known_below_the_command_line() -> None:
    """Of `ltx2 generate`: the library spells as that command. And there, messages name options of keys by the table."""
    assert spelling_of(COMMANDS["generate"].options).options == {**GENERATE, "output": "-o"}
    folder = Path(ltx2_cli.__file__).parent
    named = re.compile(rf"(?<![\w-])({'|'.join(GENERATE.values())})(?![\w-])")
    found = {}
    for path in (path for path in folder.rglob("*.py") if "cli" not in path.parts and path.name != "spelling.py"):
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        prose = {node.value for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        texts = [node for node in nodes if isinstance(node, ast.Constant) and node not in prose]
        found[path.name] = [text.value for text in texts if isinstance(text.value, str) and named.search(text.value)]
    assert {name: texts for name, texts in found.items() if texts} == {}


@pytest.mark.parametrize("name", [name for name, key in NAMES.items() if name != key])
def test_the_name_of_an_option_is_taken_everywhere(tmp_path: Path, name: str) -> None:
    """In YAML, `--set`, jobs, variables of the environment and the library."""
    values = {"upsampler": "up", "noise": "n", "init_noise": "n", "temporal_upsample": "fps", "steps": 3, "segment": []}
    value = values.get(name, 0.5)
    page = tmp_path / "page.yaml"
    page.write_text(f"{name}: {value}\n")
    for asked in (
        merge_layers({}, page),
        merge_layers({}, dotlist=[f"{name}={value}"]),
        merge_layers({name: value}),
        merge_layers({}, environment=read_environment({f"LTX2_{name.upper()}": str(value)})),
    ):
        got = asked.values[NAMES[name]]
        assert (list(got) if isinstance(got, tuple) else got) == value
    assert key_lines(f"\n{name}: 1")[NAMES[name]] == 2


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        ("extend clip.mp4 --seconds 4 --model ltx2.3", "ltx2 generate --prompt 'a ball' --model demo"),
        ("generate --prompt x --model ltx2.3", "ltx2 generate --prompt 'a ball' --model demo"),
        ("plan --model ltx2.3", "ltx2 plan --prompt 'a ball' --model demo"),
    ],
)
def test_a_miniature_is_asked_for_by_a_command_that_needs_no_clip(
    words: str, typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["ltx2", *words.split()])
    assert command_line(Alternative({"prompt": "a ball"}, {"model": "demo"}, standalone=True)) == typed


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("gen", "closest: `ltx2 generate`"),
        ("retkae", "closest: `ltx2 retake`"),
        ("config valdate", "closest: `ltx2 config validate`"),
        ("help", "`ltx2 --help`"),
        ("version", "`ltx2 --version`"),
        ("-v", "`ltx2 --version`"),
        ("nonsense", "`ltx2 --help` lists the commands"),
        ("generate x --height tall", "error: --height 'tall' is not an integer\n"),
        ("generate x --fps fast", "error: --fps 'fast' is not a number\n"),
        ("generate x --dtype bf16", "error: --dtype 'bf16' is not one of bfloat16, float32\n"),
        ("generate x --steps 0", "error: steps 0 is not in 1 to 1000; nearest: --steps 1\n"),
        ("generate x --set steps=0", "error: steps 0 is not in 1 to 1000; nearest: --steps 1\n"),
        (
            "generate x --seed abc",
            "error: `seed` is 'abc'; expected 7, 1 2 3 or 0..15\nhint: for example: --seed 0..15\n",
        ),
    ],
)
def test_what_is_typed_wrong_has_an_answer(said: Said, words: str, answer: str) -> None:
    assert answer in (message := said(*words.split()))
    assert "Input should" not in message


def test_help_has_no_types_of_python_and_the_defaults_of_profiles(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    for command in ["", *COMMANDS]:
        help_text = said(*command.split(), "--help")
        assert re.findall(r"<(?:bool|str|int|float|path|list)\W.*", help_text, re.IGNORECASE) == []
    shown = dict(re.findall(r"--([\w-]+) .*\[(default: .*?)\]", said("generate", "--help")))
    for name in ("height", "width", "num-frames", "fps", "image-crf", "guidance-scale", "audio-guidance-scale"):
        usual, demo = (vars_of(model)[NAMES[name.replace("-", "_")]] for model in ("ltx2", "demo"))
        assert shown[name].split("; ")[0] == f"default: {usual:g}"
        assert (f"demo: {demo:g}" in shown[name]) is (usual != demo)
    assert shown["num-inference-steps"] == "default: 40; ltx2.3: 30; demo: 20; distilled: 8"


def vars_of(model: str) -> dict[str, Any]:
    """The values of a model's profile, by dotted key."""
    return {key: value for page in profile_layers({"model": model}).values() for key, value in page.items()}
