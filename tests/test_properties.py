"""Whatever is asked for and whatever lies in a file, the answer is a clip's request or a sentence: a thousand cases,
always the same ones."""

import io
import json
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from ltx2_cli.artifacts.outputs import Product
from ltx2_cli.artifacts.tensor_file import CHECKSUM, checksum
from ltx2_cli.cli.removed import RENAMED
from ltx2_cli.console import print_error
from ltx2_cli.core.provenance import (
    environment_changes,
    extend_history,
    provenance,
    read_provenance,
    source_history,
)
from ltx2_cli.core.report import Report
from ltx2_cli.core.run_saver import RunSaver
from ltx2_cli.core.saved_run import RunGoal, open_saved_run
from ltx2_cli.core.state import RunState
from ltx2_cli.diffusion.geometry import SIZE_KEYS
from ltx2_cli.diffusion.latents import open_latents, save_latents, to_tokens
from ltx2_cli.errors import CommandError, DoesNotFitError, PartlyFailedError, UsageError
from ltx2_cli.media.clip import Media
from ltx2_cli.media.write import write_mp4
from ltx2_cli.plan.resolve import Plan, resolve
from ltx2_cli.request.profiles import read_spec, to_yaml, validated_spec
from ltx2_cli.request.spec import RunSpec, Streams
from ltx2_cli.request.spelling import NAMES
from ltx2_cli.request.validation import RANGES
from ltx2_cli.request.yaml import dump, parse
from ltx2_cli.runs.build_request import Layers
from ltx2_cli.runs.inspect import inspect
from ltx2_cli.runs.latents import latents_request
from ltx2_cli.runs.replay import find_source, read_clip
from ltx2_cli.runs.resume import moved_outputs
from ltx2_cli.runs.session import system_error
from program import run_program

LONGEST = 60.0  # seconds: most take a hundredth of one, and what would never end takes longer
MOST_LINES = 3
REFUSED = (UsageError, DoesNotFitError)
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # of casts of what a file says


def cases(number: int) -> Any:
    """Runs a test so many times, with the same values every time."""
    slow = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=number, derandomize=True, database=None, deadline=None, suppress_health_check=slow)


# Values of every kind, those at the edges more often

TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", " ", "0..", "..", "1:30", "0100", "nan", "-1", "a/b", "a\0b", "\x1b[2J", "a\nb", "${height}"]),
    st.sampled_from(
        ["x" * 5000, "/dev/zero", "/dev/null", ".", "..", "~", "~nobody/x", "/etc/passwd", "C:\\x", ":0.8"]
    ),
)
PIECES = st.binary(max_size=8) | st.text(max_size=8).map(lambda text: text.encode("utf-8", "replace"))
NUMBERS = st.one_of(
    st.integers(), st.floats(), st.integers(-2, 70), st.sampled_from([2**31, 2**32, 2**63, 10**30, -(2**63), 1e38])
)
PLAIN = st.one_of(TEXTS, NUMBERS, st.booleans(), st.none())
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = [*NAMES.values(), "sharding.mesh", "sharding.mesh.heads", "sharding.weights.embed", "sharding.profile"]
NUMERIC = {*RANGES, "seed", "sigmas", "stg_blocks", "second_stage.sigmas", "sharding.mesh.heads"}


@st.composite
def asked(draw: Callable[..., Any]) -> tuple[str, Any]:
    """A key and a value for it, often of the right kind."""
    key = draw(st.sampled_from(KEYS)) if draw(st.integers(0, 9)) else draw(st.text(max_size=10))
    fitting = NUMBERS if key in NUMERIC else TEXTS
    return key, draw(fitting | st.lists(fitting, max_size=3) | VALUES)


@st.composite
def mutated(draw: Callable[..., Any], content: bytes) -> bytes:
    """Bytes of which some bits are flipped, some are cut off, put in or written over; more often near the beginning."""
    changed = bytearray(content)
    for _ in range(draw(st.sampled_from([1, 1, 3]))):
        place = draw(st.integers(0, 200) | st.integers(0, max(len(changed) - 1, 0)))
        match draw(st.sampled_from(["flip", "cut", "insert", "overwrite"])):
            case "flip" if place < len(changed):
                changed[place] ^= 1 << draw(st.integers(0, 6))
            case "cut":
                del changed[place : draw(st.none() | st.integers(place, place + 100))]
            case "insert":
                changed[place:place] = draw(PIECES)
            case "overwrite":
                new = draw(PIECES)
                changed[place : place + len(new)] = new
    return bytes(changed)


@st.composite
def altered(draw: Callable[..., Any], page: Mapping[str, Any]) -> dict[str, Any]:
    """A page with another value somewhere, or without one, or with one more."""
    changed: Any = parse(dump(page))
    section = changed
    while True:
        key = draw(st.sampled_from(sorted(section)))
        if not (isinstance(section[key], dict) and section[key] and draw(st.booleans())):
            break
        section = section[key]
    match draw(st.sampled_from(["value", "gone", "more"])):
        case "value":
            section[key] = draw(VALUES)
        case "gone":
            del section[key]
        case "more":
            section[draw(st.text(max_size=5))] = draw(VALUES)
    return changed


# What must hold


def answered(folder: Path, act: Callable[[], object]) -> None:
    """The action succeeds or refuses in at most three lines, in time, and writes nothing into the folder."""
    before, began = contents(folder), time.monotonic()
    try:
        act()
    except (UsageError, DoesNotFitError, OSError) as failure:
        error = system_error(failure) if isinstance(failure, OSError) else failure
        assert isinstance(error, REFUSED)
        lines = shown(error).splitlines()
        assert 1 <= len(lines) <= MOST_LINES, lines
        assert lines[0].startswith("error: ")
    assert time.monotonic() - began < LONGEST
    assert contents(folder) == before


def contents(folder: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


def shown(error: CommandError) -> str:
    """What a terminal shows of a refusal; nothing in it steers the terminal."""
    with redirect_stderr(io.StringIO()) as stream:
        print_error(str(error), error.hint)
    text = stream.getvalue()
    assert all(letter.isprintable() or letter in "\n\t" or ord(letter) > 0x9F for letter in text), text
    return text


# What there is to damage


@pytest.fixture(scope="module")
def plan() -> Plan:
    return resolve(read_spec(prompt="a ball", model="demo", seed=3, num_frames=9, height=64, width=64))


@pytest.fixture(scope="module")
def files(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A clip, its record, its latents and the run that makes it, half done, as the program writes them."""
    folder = tmp_path_factory.mktemp("files")
    paths = {kind: folder / f"clip.{kind}" for kind in ("mp4", "yaml", "safetensors", "run")}
    noise = np.random.default_rng(0)
    latents = Streams(*(noise.standard_normal(shape, np.float32) for shape in plan.latent_shapes))
    facts = {"model_version": plan.arch.model_version, "fps": "24.0", "stage": "final"} | dict(
        zip(SIZE_KEYS, ("9", "64", "64"), strict=True)
    )
    save_latents(latents, paths["safetensors"], facts)
    history = extend_history(
        (source_history(open_latents(paths["safetensors"]), 24.0),),
        plan.stages[-1],
        Streams(*map(np.asarray, to_tokens(latents))),
    )
    about = {**facts, "record": to_yaml(plan.spec, provenance(plan, {"vae/a.safetensors": "0" * 64}, history[0]))}
    save_latents(latents, paths["safetensors"], about)
    paths["yaml"].write_text(about["record"])
    frames, sound = np.zeros((9, 64, 64, 3), np.uint8), np.zeros((18_000, 2), np.float32)
    write_mp4(Media(frames, sound, 24.0, 48_000), paths["mp4"], about)
    progress = RunState(step=7, current=Streams(*map(np.asarray, to_tokens(latents))))
    RunSaver(paths["run"], plan, RunGoal(Product.clips, None), Report(), True, 0)(progress)
    return paths


@pytest.fixture(scope="module")
def record(files: dict[str, Path]) -> dict[str, Any]:
    return parse(files["yaml"].read_text())


def test_the_undamaged_examples_are_valid(files: dict[str, Path], plan: Plan) -> None:
    """Or nothing below would be tested."""
    for kind, read in readings(plan).items():
        read(files[kind])


def readings(plan: Plan) -> dict[str, Callable[[Path], object]]:
    """What the verbs do with each kind of file before anything is loaded."""

    def page(path: Path) -> None:
        inspect(path)
        find_source(read_clip(path), None)
        validated_spec(read_clip(path).asked({}, []))

    def latents(path: Path) -> None:
        inspect(path)
        file = open_latents(path)
        file.read()
        latents_request(file, {"model": "demo"}, Layers(), {"lora": []}, SimpleNamespace(trust=False))

    def run(path: Path) -> None:
        kept = open_saved_run(path)
        moved_outputs(kept.spec({}), kept, {})
        list(environment_changes(read_provenance(kept.request.values, str(path)), plan))
        kept.progress(plan)

    return {"mp4": page, "yaml": page, "safetensors": latents, "run": run}


# The cases


@cases(250)
@given(st.lists(asked(), min_size=1, max_size=2))
def test_any_request_is_resolved_or_refused_in_a_sentence(tmp_path: Path, values: list[tuple[str, Any]]) -> None:
    answered(tmp_path, lambda: read_spec({"prompt": "a ball", "model": "demo", **dict(values)}))


@cases(100)
@given(st.lists(asked().map(lambda pair: "{}={}".format(*pair)) | TEXTS, min_size=1, max_size=2))
def test_any_setting_is_accepted_or_refused_in_a_sentence(tmp_path: Path, dotlist: list[str]) -> None:
    answered(tmp_path, lambda: read_spec({"prompt": "a ball", "model": "demo"}, dotlist=dotlist))


@cases(100)
@given(st.data())
def test_any_config_is_accepted_or_refused_in_a_sentence(
    tmp_path: Path, record: dict[str, Any], data: st.DataObject
) -> None:
    page = {key: record[key] for key in data.draw(st.lists(st.sampled_from(sorted(record)), max_size=4))}
    text = data.draw(mutated(dump({"prompt": "a ball", "model": "demo", **page}).encode()) | st.binary(max_size=40))
    (tmp_path / "page.yaml").write_bytes(text)
    answered(tmp_path, lambda: read_spec(config=tmp_path / "page.yaml"))


@cases(150)
@given(st.data())
def test_any_record_is_accepted_or_refused_in_a_sentence(
    tmp_path: Path, files: dict[str, Path], record: dict[str, Any], plan: Plan, data: st.DataObject
) -> None:
    path = tmp_path / "clip.yaml"
    content = altered(record).map(lambda page: dump(page).encode("utf-8", "surrogatepass"))
    path.write_bytes(data.draw(content | mutated(files["yaml"].read_bytes())))
    answered(tmp_path, lambda: readings(plan)["yaml"](path))


def any_tensors(path: Path, data: st.DataObject) -> bytes:
    """A safetensors file with changed bytes; or under a right checksum, with other metadata or tensors."""
    if not data.draw(st.integers(0, 2)):
        return data.draw(mutated(path.read_bytes()))
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    if data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(metadata)) | st.text(max_size=5))
        metadata[key] = data.draw(TEXTS | NUMBERS.map(str) | VALUES.map(lambda value: json.dumps(value, default=str)))
    else:
        name = data.draw(st.sampled_from(sorted(tensors)) | st.text(max_size=5))
        shape = data.draw(st.just(tensors.get(name, np.zeros(1)).shape) | st.lists(st.integers(0, 3), max_size=5))
        with np.errstate(all="ignore"):  # a NaN is some integer, 1e300 a half infinity
            tensors[name] = np.full(
                shape, data.draw(st.floats()), data.draw(st.sampled_from(["f2", "f4", "f8", "i8", "?"]))
            )
    if data.draw(st.integers(0, 4)):
        metadata[CHECKSUM] = checksum(tensors, metadata)
    save_file(tensors, path.with_name("changed"), metadata)
    return path.with_name("changed").read_bytes()


@cases(150)
@given(st.data())
def test_any_latents_file_is_accepted_or_refused_in_a_sentence(
    tmp_path: Path, files: dict[str, Path], plan: Plan, data: st.DataObject
) -> None:
    path = tmp_path / "clip.safetensors"
    path.write_bytes(any_tensors(files["safetensors"], data))
    answered(tmp_path, lambda: readings(plan)["safetensors"](path))


@cases(150)
@given(st.data())
def test_any_run_file_is_accepted_or_refused_in_a_sentence(
    tmp_path: Path, files: dict[str, Path], plan: Plan, data: st.DataObject
) -> None:
    path = tmp_path / "clip.run"
    path.write_bytes(any_tensors(files["run"], data))
    answered(tmp_path, lambda: readings(plan)["run"](path))


@cases(60)
@given(st.data())
def test_any_video_is_accepted_or_refused_in_a_sentence(
    tmp_path: Path, files: dict[str, Path], plan: Plan, data: st.DataObject
) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(data.draw(mutated(files["mp4"].read_bytes())))
    answered(tmp_path, lambda: readings(plan)["mp4"](path))


FLAGS = [*(f"--{name.replace('_', '-')}" for name in NAMES if "." not in name), "--draft", "--save-run-every"]
OPTIONS = st.sampled_from([flag for flag in FLAGS if flag not in RENAMED])  # a note is a line besides
WORDS = st.lists(st.tuples(OPTIONS, TEXTS | NUMBERS.map(str)), max_size=2)


def typed(folder: Path, *command: str) -> tuple[int, str, str]:
    """What the program does in a folder: it ends in time, writes nothing there, and refuses in at most three lines.
    Exit code, stdout, stderr."""
    before, began = contents(folder), time.monotonic()
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        patch.chdir(folder)
        code = run_program(patch, *command)
    lines = err.getvalue().splitlines()
    table = next((number for number, line in enumerate(lines, 1) if line.startswith("jobs: ")), 0)  # of a batch
    lines = lines[table:]
    assert code in (0, 2, 3, PartlyFailedError.exit_code), lines
    assert code not in (2, 3) or len(lines) <= MOST_LINES, lines
    assert time.monotonic() - began < LONGEST
    assert contents(folder) == before
    return code, out.getvalue(), err.getvalue()


@cases(40)
@given(WORDS)
def test_any_command_line_is_accepted_or_refused_in_a_sentence(tmp_path: Path, words: list[tuple[str, str]]) -> None:
    options = [f"{option}={value}" for option, value in words]
    code, out, err = typed(tmp_path, "generate", "--dry-run", "--model", "demo", "--prompt", "a ball", *options)
    assert code in (0, 2, 3)
    assert bool(out) == (code == 0)
    assert len(err.splitlines()) <= MOST_LINES


SIZE_SHORTHANDS = ("--model", "demo", "--resolution", "720p", "--duration", "2.1s")


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "x", *SIZE_SHORTHANDS, "--lora", "absent.safetensors"],
        ["generate", "x", *SIZE_SHORTHANDS[2:], "--model", "absent"],
        ["generate", "x", *SIZE_SHORTHANDS, "--image", "absent.png"],
        ["generate", "x", *SIZE_SHORTHANDS, "--stg-blocks", "99", "--dry-run"],
        ["sweep", "x", "--model", "demo", "--lora", "absent.safetensors", "--guidance-scale", "3,4"],
        ["decode", "absent.safetensors"],
        ["upsample", "absent.safetensors"],
        ["plan", *SIZE_SHORTHANDS, "--lora", "absent.safetensors"],
        ["plan", "--topology", "v9:2x2"],
        ["bench", "run", *SIZE_SHORTHANDS, "--lora", "absent.safetensors"],
        ["config", "show", *SIZE_SHORTHANDS, "--steps", "0"],
    ],
    ids=" ".join,
)
def test_what_a_request_became_is_not_said_where_it_is_refused(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the variables of the environment nor what a wished size became: a refusal has three lines."""
    monkeypatch.setenv("LTX2_IMAGE_CRF", "3")
    code, out, err = typed(tmp_path, *words)
    assert (code, out, err.partition(" ")[0]) == (2, "", "error:")
    assert "No such option" not in err


LINES = st.one_of(
    st.lists(asked(), min_size=1, max_size=3).map(lambda values: json.dumps({"prompt": "a ball", **dict(values)})),
    VALUES.map(lambda value: json.dumps(value, default=str)),
    TEXTS,
)


@cases(50)
@given(st.lists(LINES, min_size=1, max_size=3))
def test_any_jobs_are_made_or_refused_in_a_sentence(tmp_path: Path, lines: list[str]) -> None:
    """Of some broken lines, each has a row of the table."""
    (tmp_path / "jobs").write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    code, out, err = typed(tmp_path, "batch", "jobs", "--dry-run", "--model", "demo")
    assert bool(out) <= (code in (0, PartlyFailedError.exit_code))
    assert code != PartlyFailedError.exit_code or err.count("  failed  ") >= 1


def test_every_key_is_covered_by_a_property() -> None:
    assert {field.name for field in fields(RunSpec)} - {"asked"} <= {name.split(".")[0] for name in KEYS}
