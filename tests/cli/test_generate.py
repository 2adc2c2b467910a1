"""`ltx2 generate` from its arguments to its exit code, around a run that only remembers what it was asked."""

import errno
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np
import pytest

from ltx2_cli.artifacts import files
from ltx2_cli.artifacts.outputs import output_paths
from ltx2_cli.core.report import Report
from ltx2_cli.diffusion.latents import save_latents
from ltx2_cli.errors import MAKE_ROOM, NotFiniteError, RunError
from ltx2_cli.estimate.alternatives import Request
from ltx2_cli.estimate.fit import Typed
from ltx2_cli.media.clip import Media
from ltx2_cli.media.write import write_mp4
from ltx2_cli.request.profiles import read_spec, to_yaml
from ltx2_cli.request.spec import DType, RunSpec, Streams
from ltx2_cli.runs import execute, preflight
from ltx2_cli.runs.session import STARTED
from ltx2_cli.weights.hub import Download
from program import run_program

if TYPE_CHECKING:
    from ltx2_cli.core.run_saver import RunSaver

Run = Callable[..., tuple[int, str, str]]
FINDINGS = "error: height 500 is not a multiple of 32; nearest: --height 480 or 512\n       num_frames 20 is not 8k + 1"

EVERY_OPTION = """
    generate --prompt rain --negative-prompt blur --model demo --height 64 --width 96 --num-frames 9 --fps 12.5
    --steps 3 --seed 4294967295 --guidance-scale 2 --stg-scale 0 --modality-scale 1.5 --guidance-rescale 0.1
    --audio-guidance-scale 6 --audio-stg-scale 0.5 --audio-modality-scale 2.5 --audio-guidance-rescale 0.2
    --recipe distilled --lora a/b --lora c:0.5
    --stg-blocks 28,29 --dtype bfloat16 --text-encoder-dtype float16 --sharding single --init-noise noise
    --save-latents latents -o clip.mp4 --force --config file.yaml --set scan_layers=false --set max_sequence_length=7
    --compile-cache programs
"""


class Checkpoint(NamedTuple):
    """One without networks."""

    files: dict[str, object]


class Components(NamedTuple):
    """None of which was used."""

    loaded: frozenset[str]


@dataclass
class Core:
    """Stands in for the plan and the run: both fail as told, and keep the request."""

    asked: RunSpec | None = None
    failure: BaseException | None = None
    findings: tuple[str, ...] = ()
    checkpoint: Checkpoint = field(default_factory=lambda: Checkpoint({}))
    lora_deltas: dict[str, object] = field(default_factory=dict)
    stages: tuple[()] = ()
    remembered: list[tuple[object, ...]] = field(default_factory=list)

    def resolve(self, spec: RunSpec) -> "Core":
        self.spec = self.asked = spec
        return self

    def open_components(self, plan: "Core") -> Components:
        return Components(frozenset())

    def warm_up(self, plan: "Core", components: Components, report: Report) -> None:
        report.note(f"warm: {plan.spec.prompt}")

    def write(
        self, plan: "Core", components: Components, report: Report, *more: object
    ) -> Iterator[tuple[Path, list[str]]]:
        with report.activity("imagine"), report.steps(2) as advance:
            advance(2)
        if self.failure:
            raise self.failure
        yield from ((path, list(self.findings)) for path in output_paths(plan.spec))


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    core = Core()
    monkeypatch.setattr("ltx2_cli.runs.make.random_seed", lambda spec: 5)
    monkeypatch.setattr(preflight, "missing_downloads", lambda spec, networks: [])
    monkeypatch.setattr(preflight, "check_published", lambda request, typed: None)
    monkeypatch.setattr(preflight, "fitting_plan", lambda request, typed: core.resolve(request.spec))
    monkeypatch.setattr(execute, "programs", lambda plan, ends: [])
    monkeypatch.setattr(execute, "expected_time", lambda plan, product: f"about 3 s for {product}")
    monkeypatch.setattr(execute, "remember", lambda *run: core.remembered.append(run))
    monkeypatch.setattr(execute, "perf_facts", lambda plan, measured: {"settings": {"measured": measured}})
    for name in ("open_components", "warm_up", "write"):
        monkeypatch.setattr(execute, name, getattr(core, name))
    return core


@pytest.fixture
def ltx2(core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the program in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: (run_program(monkeypatch, *arguments), *capsys.readouterr())


def test_stdout_has_only_the_path_and_stderr_the_messages(ltx2: Run):
    code, out, err = ltx2("generate", "--model", "demo", "--prompt", "rain")
    assert (code, out) == (0, "out/rain-demo-s5.mp4\n")
    lines = [re.sub(r"\d+\.\d", "T", line) for line in err.splitlines()]
    assert lines == [
        "seed: 5",
        "time: about 3 s for clips",
        "2 steps: T s",
        "wrote out/rain-demo-s5.mp4, out/rain-demo-s5.yaml in T s; at most T GB of memory;"
        " compiled no programs, 0 from the cache",
    ]


def test_verbose_prints_every_stage_and_quiet_nothing(ltx2: Run):
    asked = ("generate", "--model", "demo", "--prompt", "rain", "--force")
    assert "\nimagine: 0.0 s\n" in ltx2(*asked, "-v")[2]
    assert ltx2(*asked, "-q") == (0, "out/rain-demo-s5.mp4\n", "")
    code, out, err = ltx2(*asked, "-q", "--height", "33")
    assert (code, out, err.splitlines()[0].split(" ")[0]) == (2, "", "error:")
    assert "--verbose and --quiet contradict each other\nhint: leave one of them out" in ltx2(*asked, "-qv")[2]


def test_json_is_one_line_with_the_result_and_no_paths(ltx2: Run, core: Core):
    core.findings = ("the audio is silent",)
    code, out, err = ltx2("generate", "--prompt", "rain", "--num-videos", "2", "--json", "--quiet", "--strict")
    (line,) = out.splitlines()
    result = json.loads(line)
    paths = [f"out/rain-ltx2-s{seed}.mp4" for seed in (5, 6)]
    assert (code, err.splitlines()[0]) == (
        4,
        f"error: {paths[0]}: the audio is silent. {paths[1]}: the audio is silent",
    )
    assert (result["paths"], result["seeds"]) == (paths, [5, 6])
    assert result["flaws"] == [f"{path}: the audio is silent" for path in paths]
    assert result["stages"].keys() == {"imagine", "denoise"}
    assert 0 <= sum(result["stages"].values()) <= result["seconds"]
    assert result["peak_memory"]["host"] > 10**7
    assert result["peak_memory"]["device"] is None
    assert len(core.remembered) == 1
    _, out, err = ltx2("generate", "--warmup", "--json")
    assert (json.loads(out)["paths"], "time:" in err) == ([], False)
    assert len(core.remembered) == 1


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [
        (RunError("the vocoder is not finite", "--dtype float32"), 1, ("the vocoder is not finite", "--dtype float32")),
        (KeyboardInterrupt(), 130, ("interrupted", "")),
    ],
)
def test_json_says_a_failure_too(ltx2: Run, core: Core, failure: BaseException, code: int, said: tuple[str, str]):
    core.failure = failure
    ended, out, err = ltx2("generate", "--prompt", "rain", "--json")
    assert (ended, json.loads(out)) == (code, {"error": said[0], "hint": said[1], "exit_code": code})
    assert said[0] in err
    ended, out, err = ltx2("generate", "--prompt", "rain", "--json", "--height", "tall")
    assert (ended, json.loads(out)["exit_code"]) == (2, 2)
    assert f"error: {json.loads(out)['error']}\n" in err


def test_a_download_says_how_fast_it_was(ltx2: Run, core: Core, monkeypatch: pytest.MonkeyPatch):
    clock = [100.0]

    def fetch(request: Request, typed: Typed) -> Core:
        clock[0] += 20
        return core.resolve(request.spec)

    for module in (execute, preflight):
        monkeypatch.setattr(module, "monotonic", lambda: clock[0])
    monkeypatch.setattr(preflight, "fitting_plan", fetch)
    monkeypatch.setattr(preflight, "check_disk_space", lambda downloads: None)
    files = [Download("a/b", name, size, False) for name, size in (("c", 4 * 10**9), ("d", 6 * 10**9))]
    monkeypatch.setattr(preflight, "missing_downloads", lambda spec, networks: files)
    _, _, err = ltx2("generate", "--prompt", "rain")
    assert "downloading 10.0 GB of a/b into " in err
    assert "\ndownloaded 10.0 GB in 20 s, 0.5 GB/s\n" in err
    *_, seconds, cold = core.remembered[-1]
    assert (seconds, cold) == (pytest.approx(clock[0] - STARTED - 20), False)
    files.clear()
    assert "downloaded" not in ltx2("generate", "--prompt", "rain")[2]


def test_variables_of_the_environment_are_named(ltx2: Run, core: Core, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LTX2_FPS", "30")
    monkeypatch.setenv("LTX2_GUIDANCE__VIDEO__STG_SCALE", "0")
    monkeypatch.setenv("LTX2_HOME", "/x")
    monkeypatch.setenv("LTX2_HIEGHT", "3")
    code, _, err = ltx2("generate", "--prompt", "rain")
    assert code == 0
    assert err.splitlines()[:3] == [
        "from the environment: LTX2_FPS, LTX2_GUIDANCE__VIDEO__STG_SCALE",
        "LTX2_HIEGHT is not read: it is of no key of a request; closest: LTX2_HEIGHT",
        "LTX2_HOME is not read: it is of no key of a request",
    ]
    assert (core.asked.fps, core.asked.guidance.video.stg_scale) == (30.0, 0.0)
    _, _, err = ltx2("generate", "--prompt", "rain", "--fps", "25")
    assert err.startswith("from the environment: LTX2_GUIDANCE__VIDEO__STG_SCALE\n")
    _, _, err = ltx2("generate", "--prompt", "rain", "--stg-scale", "1", "--set", "fps=25")
    assert "from the environment" not in err
    assert (core.asked.fps, core.asked.guidance.video.stg_scale) == (25.0, 1.0)


def test_size_and_length_are_asked_for_as_people_say_them(ltx2: Run, core: Core):
    wished = ("--resolution", "720p", "--aspect", "16:9", "--duration", "8s", "--fps", "25")
    code, _, err = ltx2("generate", "--prompt", "rain", *wished)
    assert code == 0
    assert "asked: 720p, 16:9, 8s; got: 1280x704, 201 frames, 8.04 s\n" in err
    assert (core.asked.width, core.asked.height, core.asked.num_frames) == (1280, 704, 201)
    refused = [
        "error: --width is not taken beside --aspect or --resolution",
        "hint: leave out --aspect or --resolution",
    ]
    for width in (("--width", "1280"), ("--set", "width=1280")):
        code, _, err = ltx2("generate", "--prompt", "rain", *wished, *width)
        assert (code, err.splitlines()) == (2, refused)


def test_references_and_their_mask_are_conditions(ltx2: Run, core: Core, tmp_path: Path):
    for name in ("a.png", "b.mp4", "mask.png"):
        (tmp_path / name).touch()
    given = ("--reference", "b.mp4:0.8", "--image", "a.png@-1", "--reference-mask", "mask.png")
    assert ltx2("generate", "--prompt", "rain", *given, "--reference-strength", "0.5")[0] == 0
    conditions = [(of.kind, of.path, of.frame, of.strength) for of in core.asked.conditions]
    wanted = [("image", "a.png", -1, None), ("reference", "b.mp4", 0, 0.8), ("mask", "mask.png", 0, None)]
    assert (conditions, core.asked.reference_strength) == (wanted, 0.5)
    assert ltx2("generate", "--prompt", "rain", "--image", "a.png:0.5", "--video", "b.mp4@8:0.25")[0] == 0
    conditions = [(of.kind, of.path, of.frame, of.strength) for of in core.asked.conditions]
    assert conditions == [("image", "a.png", 0, 0.5), ("video", "b.mp4", 8, 0.25)]
    code, _, err = ltx2("generate", "--prompt", "rain", "--reference", "")
    assert (code, err.splitlines()[0]) == (2, "error: --reference '' is not FILE[:STRENGTH]")


@pytest.mark.parametrize("seeds", ["3 5..7", "3, 5..7", "3,5,6 7"])
def test_several_seeds_make_several_clips(ltx2: Run, core: Core, seeds: str):
    code, out, _ = ltx2("generate", "--seed", *seeds.split(), "--prompt", "rain", "-o", "clip.mp4")
    assert (code, out.split()) == (0, [f"clip-s{seed}.mp4" for seed in (3, 5, 6, 7)])


def test_a_warm_up_makes_no_clip_and_needs_no_prompt(ltx2: Run, tmp_path: Path):
    (tmp_path / "clip.mp4").write_text("mine")
    assert ltx2("generate", "--warmup", "-o", "clip.mp4")[:2] == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]


def test_timings_are_written_beside_the_clip(ltx2: Run, tmp_path: Path):
    arguments = ("generate", "--prompt", "rain", "--perf-dump", "new/perf.json", "--profile", "trace")
    assert ltx2(*arguments)[0] == 0
    said = json.loads((tmp_path / "new" / "perf.json").read_text())
    assert [step["name"] for step in said["steps"]] == ["denoise", "imagine"]
    assert len(said["denoise_steps_ms"]) == 2
    assert (tmp_path / "trace").is_dir()
    assert ltx2(*arguments)[::2] == (
        2,
        "error: new/perf.json exists\nhint: --force overwrites it, or name another: --perf-dump FILE\n",
    )
    assert ltx2(*arguments, "--force")[0] == 0


def test_every_option_reaches_its_value(ltx2: Run, core: Core, tmp_path: Path):
    (tmp_path / "noise").write_text("")
    (tmp_path / "file.yaml").write_text("keep_resident: true\nfps: 11\nlora: [d]")
    assert ltx2(*EVERY_OPTION.split())[:2] == (0, "clip.mp4\n")
    spec = core.asked
    assert spec is not None
    assert (spec.prompt, spec.negative_prompt, spec.model) == ("rain", "blur", "demo")
    assert (spec.recipe, spec.lora) == ("distilled", ("a/b", "c:0.5"))
    assert (spec.height, spec.width, spec.num_frames, spec.fps) == (64, 96, 9, 12.5)
    assert (spec.num_inference_steps, spec.seed, spec.stg_blocks) == (3, (4294967295,), (28, 29))
    assert tuple(vars(spec.guidance.video).values()) == (2.0, 0.0, 1.5, 0.1)
    assert tuple(vars(spec.guidance.audio).values()) == (6.0, 0.5, 2.5, 0.2)
    assert (spec.dtype, spec.text_encoder_dtype) == (DType.bfloat16, DType.float16)
    assert (spec.sharding.profile, spec.initial_noise, spec.save_latents) == ("single", "noise", "latents")
    assert spec.compile_cache == "programs"
    assert (spec.keep_resident, spec.scan_layers, spec.max_sequence_length) == (True, False, 7)


def test_loras_default_to_those_of_the_config(ltx2: Run, core: Core, tmp_path: Path):
    (tmp_path / "file.yaml").write_text("prompt: rain\nlora: [a/b, 'c:0.5']\nrecipe: one_stage")
    assert ltx2("generate", "--config", "file.yaml")[0] == 0
    assert core.asked is not None
    assert (core.asked.recipe, core.asked.lora) == ("one_stage", ("a/b", "c:0.5"))


@pytest.mark.parametrize("words", [["a red fox"], ["a red fox", "--seed", "1", "2"], ["--seed", "1", "2", "a red fox"]])
def test_a_positional_text_is_the_prompt(ltx2: Run, core: Core, words: list[str]):
    assert ltx2("generate", *words)[0] == 0
    assert core.asked is not None
    assert (core.asked.prompt, core.asked.seed) == ("a red fox", (1, 2) if len(words) > 1 else (5,))


def test_a_prompt_comes_from_stdin(ltx2: Run, core: Core, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("a red fox\n"))
    assert ltx2("generate", "-")[0] == 0
    assert core.asked is not None
    assert core.asked.prompt == "a red fox"
    assert ltx2("generate", "--prompt", "-")[2].splitlines()[0] == "error: stdin brings no prompt"


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "getuid", lambda: 987_654_321)  # of whom no list of users knows


@pytest.mark.usefixtures("homeless")
def test_without_a_home_nothing_is_kept_and_nothing_fails(ltx2: Run):
    assert ltx2("generate", "--prompt", "rain")[0] == 0


@pytest.mark.usefixtures("homeless")
def test_a_dry_run_needs_no_home(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    code = run_program(monkeypatch, "generate", "--model", "demo", "--prompt", "a red ball", "--dry-run")
    out, err = capsys.readouterr()
    assert (code, "\ndecode " in out) == (0, True), err


def test_an_unquoted_prompt_is_refused_with_the_quoted_one(ltx2: Run, core: Core):
    code, out, err = ltx2("generate", "a", "fox", "--seed", "7")
    assert (code, out, core.asked) == (2, "", None)
    assert err == 'error: expected one prompt, got 2\nhint: --prompt "a fox"\n'


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("~/LTX-2.3", '--prompt "a fox" --model ~/LTX-2.3'),
        ("fp8.safetensors", '--prompt "a fox" --model fp8.safetensors'),
        ("ltx", '--prompt "a fox" --model ltx'),  # a folder that is there
        ("./end.png", '--prompt "a fox ./end.png"'),
    ],
)
def test_weights_behind_the_flag_checkpoint_are_of_the_option_model(
    ltx2: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, hint: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ltx").mkdir()
    code, _, err = ltx2("generate", "a fox", "--checkpoint", path)
    note, *refusal = err.splitlines()
    assert note.startswith("note: --checkpoint is now --save-run;")
    assert (code, refusal) == (2, ["error: expected one prompt, got 2", f"hint: {hint}"])


def test_several_videos_print_several_lines(ltx2: Run):
    out = ltx2("generate", "--prompt", "rain", "--num-videos", "2", "--seed", "1", "-o", "a.mp4")[1]
    assert out == "a-s1.mp4\na-s2.mp4\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--height 500 --num-frames 20", FINDINGS),
        ("--model dmo", "error: unknown model `dmo`; closest: `demo`\nhint: known: `demo`, `ltx2`, `ltx2.3`"),
        (
            "--recipe destilled",
            "error: unknown recipe `destilled`; closest: `distilled`\nhint: known: `dfr`",
        ),
        ("--set sigmas=[1]", "error: sigmas [1.0] do not fall from at most 1 to 0; for example: --set 'sigmas=[1, 0"),
        (
            "--set heigth=3",
            "error: --set 'heigth=3': unknown key `heigth`; closest: `height`\nhint: or: `weights`",
        ),
        ("--stg-blocks a,b", "error: stg_blocks 'a,b' is not a list of blocks\nhint: for example: --stg-blocks"),
        ("-o clip.avi", "error: output 'clip.avi' is not an mp4"),
        ("--hieght 3", "error: No such option: --hieght (Possible options: --height"),
        ("--height tall", "error: --height 'tall' is not an integer\nhint: `ltx2 generate --help`"),
        ("--seed 1 2 at dawn", 'error: expected one prompt, got 3\nhint: --prompt "rain at dawn"'),
        ("3 --fps 30", 'error: expected one prompt, got 2\nhint: --prompt "rain 3"'),
        ("--config -", "error: --config reads a file, not stdin\nhint: write it into a file"),
        ("--seed 1 2 1", "error: seed 1 is there twice; for example"),
        ("--seed 0 1 --num-videos 2", "error: seed 1 is there twice; video i counts as seed + i; for example"),
        ("--seed 0..1000", "error: more than 1000 clips are asked for; nearest: --seed 0..999"),
        ("--seed some", "error: `seed` is 'some'; expected 7, 1 2 3 or 0..15"),
        ("--config none.yaml", "error: none.yaml cannot be read: No such file"),
        ("--negative-prompt \udcff", "error: negative_prompt '\\udcff' is not text in UTF-8; "),
        ("-o \udcff.mp4", "error: output '\\udcff.mp4' is not text in UTF-8; "),
        ("--num-videos 100000000", "error: num_videos 100000000 is not in 1 to 1000; nearest: --num-videos 1000"),
        ("--warmup --no-compile", "error: --warmup compiles what --no-compile forbids\nhint: leave one"),
        ("--warmup --preview p.png", "error: --warmup makes no clip that --preview could show\nhint: leave one"),
        ("--preview c.mp4 -o c.mp4", "error: c.mp4 is named for two things\nhint: name another: --preview"),
        ("--perf-dump /dev/null/p.json", "error: cannot write /dev/null/p.json: Not a directory\nhint: name another"),
        ("--profile /dev/null", "error: cannot write into /dev/null: Not a directory\nhint: name another place: --pr"),
        (
            "-o c.mp4 --save-latents c.mp4",
            "error: c.mp4 is named for two things\nhint: name another: --save-lat",
        ),
    ],
)
def test_a_wrong_request_is_an_error_with_a_hint_and_exit_code_2(ltx2: Run, core: Core, arguments: str, sentence: str):
    code, out, err = ltx2("generate", "--prompt", "rain", *arguments.split())
    assert (code, out) == (2, "")
    assert err.startswith(sentence)
    assert "\nhint: " in err or "; " in err
    assert core.asked is None


@pytest.mark.parametrize("taken", ["clip.mp4", "clip.yaml"])
def test_existing_files_are_refused_before_any_work(ltx2: Run, core: Core, tmp_path: Path, taken: str):
    (tmp_path / taken).write_text("mine")
    code, out, err = ltx2("generate", "--prompt", "rain", "-o", "clip.mp4")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {taken} exists\nhint: --force")
    assert core.asked is None
    assert ltx2("generate", "--prompt", "rain", "-o", "clip.mp4", "--force")[:2] == (0, "clip.mp4\n")


def test_taken_automatic_names_get_a_number_without_force(ltx2: Run, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rain-demo-s5.mp4").write_text("mine")
    asked = ("generate", "--prompt", "rain", "--model", "demo")
    assert ltx2(*asked)[:2] == (0, "out/rain-demo-s5-2.mp4\n")
    assert ltx2(*asked, "--force")[:2] == (0, "out/rain-demo-s5.mp4\n")


def test_a_loop_over_prompts_makes_all_clips(ltx2: Run, tmp_path: Path):
    """Also of prompts whose first words are the same; the shell calls a program that notes how it was called."""
    loop = 'while read -r p; do ltx2 generate --prompt "$p" --seed 1 2 3; done < prompts.txt'
    noting = tmp_path / "ltx2"
    noting.write_text('#!/bin/sh\nprintf "%s\\0" "$@" >> words; echo >> words\n')
    noting.chmod(0o755)
    prompts = [
        "a fox yawns at dawn in the tall, wet grass, birdsong",
        "a fox yawns at dawn in the tall, wet grass, rain",
    ]
    (tmp_path / "prompts.txt").write_text(
        "".join(f"{prompt}\n" for prompt in [*prompts, "it's 'quoted' \"twice\"", "雨"])
    )
    subprocess.run(["bash", "-c", loop], cwd=tmp_path, env={"PATH": f"{tmp_path}:/bin"}, check=True)
    made: list[str] = []
    for call in (tmp_path / "words").read_text().splitlines():
        code, out, err = ltx2(*call.split("\0")[:-1])
        assert code == 0, err
        for path in map(Path, out.split()):
            path.parent.mkdir(exist_ok=True)
            path.touch()
            made.append(path.name)
    fox = "a-fox-yawns-at-dawn-in-the-tall-wet"
    names = [f"{fox}-ltx2", f"{fox}-ltx2-2", "its-quoted-twice-ltx2", "雨-ltx2"]
    assert made == [f"{name}-s{seed}.mp4" for name in names for seed in (1, 2, 3)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--config fox.yaml -o fox.mp4", "fox.yaml is read, and would be overwritten"),
        ("--prompt rain -o x.mp4 --perf-dump x.mp4", "x.mp4 is named for two things"),
        ("--prompt rain -o x.mp4 --perf-dump x.yaml", "x.yaml is named for two things"),
        ("--prompt rain -o x.mp4 --profile x.mp4", "x.mp4 is named for two things"),
        ("--prompt rain -o x.mp4 --sharding ./fox.yaml --save-latents fox.yaml", "fox.yaml is read, and would be"),
    ],
)
def test_force_replaces_no_other_input_or_output(ltx2: Run, tmp_path: Path, arguments: str, sentence: str):
    (tmp_path / "fox.yaml").write_text("extends: single" if "sharding" in arguments else "prompt: rain")
    code, out, err = ltx2("generate", *arguments.split(), "--force")
    assert (code, out) == (2, "")
    assert f"error: {sentence}" in err
    assert [path.name for path in tmp_path.iterdir()] == ["fox.yaml"]


def test_a_record_is_repeated_without_its_saved_files(ltx2: Run, core: Core, tmp_path: Path):
    spec = read_spec(prompt="rain", model="demo", seed=1, output="fox.mp4", save_latents="fox.safetensors")
    (tmp_path / "fox.yaml").write_text(to_yaml(spec, {"ltx2": "1"}))
    for name in ("fox.mp4", "fox.safetensors"):
        (tmp_path / name).write_text("mine")
    assert ltx2("generate", "--config", "fox.yaml", "-o", "again.mp4")[:2] == (0, "again.mp4\n")
    assert core.asked is not None
    assert (core.asked.prompt, core.asked.seed, core.asked.save_latents) == ("rain", (1,), None)
    assert ltx2("generate", "--config", "fox.yaml", "--seed", "8")[:2] == (0, "out/rain-demo-s8.mp4\n")


@pytest.mark.parametrize("kind", ["yaml", "mp4", "json", "safetensors"])
def test_every_file_with_a_record_is_a_config(ltx2: Run, core: Core, tmp_path: Path, kind: str):
    record = to_yaml(read_spec(prompt="${rain} at dawn", model="demo", seed=3, height=64), {"ltx2": "1"})
    (tmp_path / "fox.yaml").write_text(record)
    media = Media(np.zeros((9, 64, 64, 3), np.uint8), np.zeros((0, 2), np.float32), 24.0, 24000)
    if kind in ("mp4", "json"):
        write_mp4(media, tmp_path / "fox.mp4", {"record": record})
    if kind == "json":
        (tmp_path / "fox.json").write_text(ltx2("info", "--json", "fox.mp4")[1])
    if kind == "safetensors":
        arrays = Streams(np.zeros((1, 4, 2, 2, 3), np.float32), np.zeros((1, 2, 9, 4), np.float32))
        save_latents(arrays, tmp_path / "fox.safetensors", {"record": record})
    code, out, err = ltx2("generate", "--config", f"fox.{kind}", "--fps", "12")
    assert (code, out) == (0, "out/rain-at-dawn-demo-s3.mp4\n"), err
    assert core.asked is not None
    assert (core.asked.prompt, core.asked.height, core.asked.fps) == ("${rain} at dawn", 64, 12)


@pytest.mark.parametrize("content", ['[{"record": 1}]', "[1]", '[{"record": {}}, {}]', "[" * 10_000, '["a", '])
def test_files_without_a_record_are_no_config(ltx2: Run, tmp_path: Path, content: str):
    (tmp_path / "a.json").write_text(content)
    code, out, err = ltx2("generate", "--config", "a.json", "--prompt", "rain")
    assert (code, out, err.startswith("error: a.json")) == (2, "", True), err


def test_drafts_are_not_checked_as_clips(ltx2: Run, core: Core, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rain-demo-s1.mp4").write_text("mine")
    asked = ("generate", "--model", "demo", "--prompt", "rain", "--seed", "1", "--draft")
    assert ltx2(*asked, "--save-latents", "draft.safetensors")[0] == 0
    assert core.asked is not None
    assert core.asked.output is None
    (tmp_path / "draft.png").write_text("mine")
    assert "error: draft.png exists" in ltx2(*asked, "--save-latents", "draft.safetensors")[2]


def test_all_outputs_are_reserved_during_the_run(ltx2: Run, core: Core, monkeypatch: pytest.MonkeyPatch):
    asked = ("generate", "--prompt", "rain", "--save-latents", "l.st", "--perf-dump", "p.json", "-o", "out/c.mp4")
    locked: set[Path] = set()

    def write(*arguments: object) -> Iterator[tuple[Path, list[str]]]:
        locked.update(files._locks)
        yield from ()

    monkeypatch.setattr(execute, "write", write)
    assert ltx2(*asked)[0] == 0
    names = ("out/c.mp4", "out/c.yaml", "out/c.run", "l.st", "p.json")
    assert locked == {files._lock_path(Path(name)) for name in names}
    assert files._locks == {}


@pytest.mark.parametrize(
    ("failure", "code", "sentence"),
    [
        (
            RunError("the vocoder is not finite", "--dtype float32"),
            1,
            "error: the vocoder is not finite\nhint: --dtype",
        ),
        (OSError(errno.ENOSPC, "No space", "a.mp4"), 1, f"error: No space: a.mp4\nhint: {MAKE_ROOM}\n"),
        (OSError(errno.EFBIG, "Too large"), 1, f"error: Too large\nhint: {MAKE_ROOM}\n"),
        (OSError(errno.EDQUOT, "No quota"), 1, f"error: No quota\nhint: {MAKE_ROOM}\n"),
        (OSError(errno.EIO, "Broken"), 1, "error: Broken\nhint: --debug shows where\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_a_failed_run_prints_a_sentence_and_has_an_exit_code(
    ltx2: Run, core: Core, failure: BaseException, code: int, sentence: str
):
    core.failure = failure
    ended, out, err = ltx2("generate", "--prompt", "rain")
    assert (ended, out) == (code, "")
    assert sentence in err
    assert "Traceback" not in err


@pytest.mark.parametrize("found", [(), ("the video is black", "the audio is silent")])
def test_flaws_are_printed_and_an_error_with_strict(ltx2: Run, core: Core, found: tuple[str, ...]):
    core.findings = found
    flaws = [f"out/rain-ltx2-s{seed}.mp4: {flaw}" for seed in (5, 6) for flaw in found]
    for options, expected in (([], 0), (["--strict", "--perf-dump", "perf.json"], 4 if found else 0)):
        code, out, err = ltx2("generate", "--prompt", "rain", "--num-videos", "2", *options)
        assert (code, out.splitlines()) == (expected, [f"out/rain-ltx2-s{seed}.mp4" for seed in (5, 6)])
        assert [line for line in err.splitlines() if line.startswith("out/")] == flaws
        assert err.endswith(
            f"error: {'. '.join(flaws)}\nhint: all files are written; without --strict this is no error\n"
        ) is (expected == 4)
    assert Path("perf.json").exists()


def test_an_interrupt_in_a_destructor_is_not_lost(ltx2: Run, core: Core, monkeypatch: pytest.MonkeyPatch):
    class Unlucky:
        def __del__(self) -> None:
            raise KeyboardInterrupt

    def write(plan: Core, *more: object) -> Iterator[tuple[Path, list[str]]]:
        Unlucky()  # Python drops what its destructor raises
        for _ in range(500):
            time.sleep(0.01)
        yield Path("too late"), []

    monkeypatch.setattr(execute, "write", write)
    code, out, err = ltx2("generate", "--prompt", "rain")
    assert (code, out) == (130, "")
    assert err.endswith("\ninterrupted\n")


@pytest.mark.parametrize(
    ("failure", "hint"),
    [
        (RunError("no room", "make some"), "hint: make some; then `ltx2 resume clip.run` goes on"),
        (NotFiniteError("not finite", "--dtype float32"), "hint: --dtype float32"),  # it would come again
        (KeyboardInterrupt(), "hint: `ltx2 resume clip.run` goes on"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("kept", [True, False])
def test_a_failed_run_says_how_to_resume(
    ltx2: Run, core: Core, failure: BaseException, hint: str, kept: bool, monkeypatch: pytest.MonkeyPatch
):
    """Not where an earlier run of this name was kept and this one was not."""

    def write(plan: Core, components: None, report: Report, product: str, start: None, saver: "RunSaver") -> NoReturn:
        saver.written = 1.0 if kept else saver.written
        raise failure

    Path("clip.run").touch()
    monkeypatch.setattr(execute, "write", write)
    err = ltx2("generate", "--prompt", "rain", "-o", "clip.mp4", "--force")[2]
    assert (err.splitlines()[-1] == hint) is (kept or isinstance(failure, NotFiniteError))
    assert ("resume" in err) is (kept and not isinstance(failure, NotFiniteError))


def test_debug_adds_the_traceback(ltx2: Run, core: Core):
    core.failure = RunError("no", "")
    code, _, err = ltx2("generate", "--prompt", "rain", "--debug")
    assert code == 1
    assert "Traceback (most recent call last)" in err
    assert err.rstrip().endswith("error: no")


@pytest.mark.parametrize("cache", ["cache", "taken/cache"])
def test_an_unexpected_error_names_the_file_with_its_traceback(
    ltx2: Run,
    core: Core,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cache: str,
):
    (tmp_path / "taken").write_text("no folder")  # the second time the cache cannot be written
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
    core.failure = ZeroDivisionError("division\nby zero")
    with pytest.raises(ZeroDivisionError) as caught:
        ltx2("generate", "--prompt", "rain")
    with pytest.raises(SystemExit):
        sys.excepthook(caught.type, caught.value, caught.tb)
    (file,) = tmp_path.rglob("error-*.txt")
    path = file if cache == "cache" else file.relative_to(tmp_path)
    assert capsys.readouterr().err.endswith(
        f"error: ZeroDivisionError: division\nhint: internal error; traceback in {path}\n"
    )
    text = file.read_text()
    assert "ltx2 generate --prompt rain\n" in text
    assert "Traceback (most recent call last)" in text
    assert "raise self.failure" in text


def test_an_unexpected_error_is_a_sentence_without_a_writable_folder(
    ltx2: Run, core: Core, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    core.failure = ZeroDivisionError("division")
    with pytest.raises(ZeroDivisionError) as caught:
        ltx2("generate", "--prompt", "rain")
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(SystemExit):
        sys.excepthook(caught.type, caught.value, caught.tb)
    assert capsys.readouterr().err.endswith("hint: internal error; --debug shows the traceback\n")
