"""Random command lines, each in a fresh folder and process: what must hold of any of them.

    python -m tools.fuzz [CASES [SEED]]    # 2000 cases by default

A case is drawn from the options of its command, values that somebody could type, and the files of `files.py`. Exit
code 1 if a promise is broken: no traceback, no exception that was not foreseen, no hang, no escape code, at most three
lines of a refusal, no file after a refusal or a dry run, and none that was read changed.
"""

import hashlib
import os
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, NamedTuple

from typer.main import get_command

from ltx2_cli.cli.app import app
from tests.forked import fork, run_main
from tools.fuzz.files import write_clip, write_files

HANG = 180.0  # seconds
REFUSALS = {2, 3}
SEVERAL = {"batch", "sweep"}  # these say a line for each job that fails
CODES = {0, 1, 4, 5} | REFUSALS
SKIPPED = {"help", "debug", "verbose", "profile", "coordinator_address", "num_processes", "process_id", "words"}
# Of hosts, and of what writes into the whole user's cache, nothing is drawn.
QUICK = ("--width", "64", "--height", "64", "--num-frames", "9", "--steps", "1")
DRAWN = (
    ("generate",) * 8
    + ("retake", "extend") * 3
    + ("batch", "sweep", "decode", "upsample") * 2
    + ("plan", "info", "replay")
)
WHOLE = ("0", "1", "-1", "2", "7", "9", "17", "25", "49", "64", "96", "100", "128", "1000000000000", "x", "")
REAL = ("0", "1", "-1", "0.5", "2", "3.5", "24", "1e9", "1e400", "nan", "inf", "x", "1,5", "")
TEXTS = {  # option: what somebody could type for it
    "aspect": ("16:9", "1:1", "9:16", "0:1", "1:1000"),
    "resolution": ("64p", "128p", "480p", "1080p", "0p", "p"),
    "duration": ("0.3s", "1s", "5s", "-1s", "1h", "2"),
    "seed": ("7", "7,8", "0..2", "3..1", "-1", "0..", "4294967296"),
    "start": ("0s", "0.1s", "0.5", "2s", "-1s", "x"),
    "stop": ("0.2s", "0.5s", "1", "2s", "9s", "0"),
    "noise_level": ("0.9", "0.5", "1", "0", "-1", "nan", "x"),
    "seconds": ("0.2s", "0.5", "1s", "-1s", "0", "x"),
    "model": (
        "demo",
        "demo",
        "demo",
        "ltx2",
        "ltx2.3",
        "ltx2.5",
        "stranger/LTX-2",
        "plain.mp4",
        "style.safetensors",
        "no",
    ),
    "recipe": ("one_stage", "two_stage", "hq", "distilled", "dfr", "dfr_temporal", "dfr_spatial", "two", "steps.yaml"),
    "sharding": ("single", "ironwood", "trillium", "cpu", "steps.yaml", "no"),
    "first_block_cache": ("0", "0.1", "1", "2", "-1", "nan", "x"),
    "windows": ("1", "2", "3", "0", "99", "x"),
    "guidance_interval": ("0,1", "0.2,0.9", "0.9,0.2", "1", "", "-1,2", "nan,1"),
    "stg_blocks": ("0", "0,1", "1,1", "99", "", "-1"),
    "settings": (
        "steps=2",
        "num_inference_steps=2",
        "width=64",
        "promt=a",
        "a=",
        "=",
        "guidance.video.stg_scale=1",
        "seed=null",
        "keyframe_segments=[24]",
        "keyframe_segments=24",
        "second_stage.follow_first=true",
        "second_stage.keyframe_windows=2",
        "second_stage.spatial_tiles=2",
        "second_stage.temporal_tiles=2",
    ),
    "vary": ("steps=1,2", "seed=1,2", "guidance_scale=1,3", "lora=[],[no.safetensors]", "x=1", "steps="),
    "shard": ("0/1", "0/2", "1/2", "2/2", "x"),
    "topology": ("v6e:2x4", "v5e:1x1", "h100:8", ":", "no"),
    "words": ("a red ball bounces", "a red ball bounces", "", "a\nred ball", "größer 🦊", "x" * 3000, "-", "{seed}"),
}
STRANGE = (
    "",
    "\x1b[31mred",
    "--width",
    "../x.mp4",
    "/etc/passwd",
    "/dev/zero",
    "x" * 300,
    "${oc.env:HOME}",
    "{line}",
    "§",
)
OUTPUTS = (
    "new.mp4",
    "new.mp4",
    "new.wav",
    "new.png",
    "new/",
    "new/%05d.exr",
    "plain.mp4",
    "own.mp4",
    "clips/new.mp4",
    "no/such/new.mp4",
    ".",
    *("loop.mp4", "{seed}.mp4", "{prompt}.mp4", "{nothing}.mp4", "new.safetensors", "new.json"),
)
STRONG, STRENGTHS = {"image", "video", "reference", "lora"}, ("",) * 9 + (":0.5", "@-1", "@0:0.5", "@99", ":x")
NEEDED = {"seconds", "vary"}
WRITTEN = {"output", "save_latents", "preview", "perf_dump", "sheet", "files"}
SUFFIXES = {  # option or argument: of the files that it mostly takes
    "image": (".png", ".jpg", ".gif", ".tiff"),
    **dict.fromkeys(("video", "clip", "reference", "reference_mask"), (".mp4", ".webm", ".mkv", ".avi", ".png")),
    "audio": (".wav", ".mp3", ".mp4"),
    "config": (".yaml", ".mp4"),
    "jobs": (".txt", ".jsonl", ".json", ".yaml"),
    **dict.fromkeys(("latents", "noise", "lora", "upsampler"), (".safetensors",)),
}


class Case(NamedTuple):
    """What was typed and printed, and the SHA-256 of each file before and after. `code`: None where it hung."""

    typed: list[str]
    code: int | None
    out: str
    err: str
    seconds: float
    before: dict[str, str]
    after: dict[str, str]


def commands() -> dict[tuple[str, ...], Any]:
    """All commands, those of groups too, by the words that name them."""
    top: dict[str, Any] = vars(get_command(app))["commands"]
    inner: dict[tuple[str, ...], Any] = {
        (name, word): each for name, group in top.items() for word, each in vars(group).get("commands", {}).items()
    }
    return {**{(name,): each for name, each in top.items() if "commands" not in vars(each)}, **inner}


def value(random: Random, files: list[str], parameter: Any) -> str:
    """A value for an option or argument, mostly one that fits."""
    name, kind = parameter.name, str(parameter.type_descriptor.annotation)
    if random.random() < 0.03:
        return random.choice((*STRANGE, *files))
    if name in WRITTEN:
        return random.choice(OUTPUTS)
    if name in TEXTS:
        return random.choice(TEXTS[name])
    if name in SUFFIXES or "Path" in kind:
        suited = [file for file in files if random.random() < 0.1 or file.endswith(SUFFIXES.get(name, ""))]
        return random.choice(suited or files) + (random.choice(STRENGTHS) if name in STRONG else "")
    if "Literal" in kind and random.random() < 0.9:
        return random.choice([word for word in kind.split("'") if word.isidentifier() or word.isalnum()])
    if "int" in kind:
        return random.choice(WHOLE)
    return random.choice(REAL) if "float" in kind else random.choice(("a red ball", *STRANGE))


def arguments(random: Random, files: list[str], words: tuple[str, ...], command: Any) -> list[str]:
    """What is typed for a command."""
    typed = list(words)
    options = [each for each in command.params if each.param_type_name == "option" and each.name not in SKIPPED]
    few = random.sample(options, min(len(options), random.choice((0, 1, 1, 2, 2, 3, 4))))
    for option in [*few, *(each for each in options if each.name in NEEDED - {option.name for option in few})]:
        typed.append(random.choice(option.opts))
        if not option.is_flag:
            typed.append(value(random, files, option))
    typed += [value(random, files, each) for each in command.params if each.param_type_name == "argument"]
    flags = {flag for option in command.params for flag in option.opts}
    if "--model" in flags and "--model" not in typed and random.random() < 0.9:
        typed += ["--model", "demo"]
    if "--width" in flags and not set(QUICK) & set(typed):
        typed += QUICK
    if "--dry-run" in flags and random.random() < 0.75:
        typed.append("--dry-run")
    return typed


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file that lies in a folder."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def broken(case: Case) -> Iterator[str]:
    """The promises that a case broke."""
    if case.code not in CODES:
        yield f"exit code {case.code}"
    for sign in ("Traceback (most", "not foreseen", "internal error", "\x1b"):
        if sign in case.out + case.err:
            yield repr(sign)
    if case.code in REFUSALS and case.typed[0] not in SEVERAL and not case.out and len(case.err.splitlines()) > 3:
        yield "more than three lines of a refusal"
    new = sorted(set(case.after) - set(case.before))
    if new and (case.code in REFUSALS or "--dry-run" in case.typed):
        yield f"files are left: {new}"
    folders = tuple(f"{word}/" for word in case.typed)
    for name in sorted(name for name in case.before if case.after.get(name) != case.before[name]):
        if "--force" not in case.typed or name not in case.typed or name.startswith(folders):
            yield f"{name} was changed"


def run_case(number: int, seed: int, source: Path, environment: dict[str, str]) -> Case:
    """Type one case."""
    random, every = Random(f"{seed}.{number}"), commands()
    words = random.choice(list(every)) if random.random() < 0.2 else (random.choice(DRAWN),)
    typed = arguments(random, [*sorted(path.name for path in source.iterdir()), "no.png", "."], words, every[words])
    with TemporaryDirectory() as place:
        folder = Path(place) / "here"
        shutil.copytree(source, folder, symlinks=True)
        before, began = digests(folder), time.monotonic()
        forked = fork(folder, run_main, *typed, environment=environment)
        forked.process.join(HANG)
        code = forked.process.exitcode
        if code is None:
            forked.process.kill()
            forked.process.join()
        out, err = (file.read_text(errors="replace") for file in (forked.out, forked.err))
        return Case(typed, code, out, err, time.monotonic() - began, before, digests(folder))


def main() -> None:
    """Run all cases; print the broken promises, and a count."""
    typed = [int(word) for word in sys.argv[1:]]
    count, seed = (*typed, *(2000, 0)[len(typed) :])
    home = Path(mkdtemp())
    environment = {"HOME": str(home), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "JAX_PLATFORMS": "cpu"}
    source = home / "files"
    source.mkdir()
    write_files(source)
    write_clip(source, lambda *words: fork(source, run_main, *words, environment=environment).process)
    codes, slowest, found = Counter[int | None](), 0.0, 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for case in pool.map(lambda number: run_case(number, seed, source, environment), range(count)):
            codes[case.code] += 1
            slowest = max(slowest, case.seconds)
            for promise in broken(case):
                found += 1
                print(f"{promise}\n  {shlex.join(['ltx2', *case.typed])}\n  {case.err[-800:]}", flush=True)
    shutil.rmtree(home)
    print(f"{count} cases: exit codes {dict(codes)}, {slowest:.0f} s at most, {found} broken promises")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
