"""`ltx2 batch` before its first clip: which jobs there are, under which names, and what is wrong with them."""

import gc
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import run
from types import SimpleNamespace

import pytest

from ltx2_cli.artifacts.outputs import Product, record_path
from ltx2_cli.errors import UsageError
from ltx2_cli.parallel.hosts import ProcessGroup
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.profiles import read_spec, to_yaml
from ltx2_cli.runs import batch, open_jobs
from ltx2_cli.runs.jobs import DONE, OPEN, Result
from program import run_program

EXPECTED_TIME = open_jobs.expected_time_of_jobs
Run = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `ltx2 batch --dry-run` over these lines in an empty folder: exit code, clips to make, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(open_jobs, "expected_time_of_jobs", lambda jobs, found: f"of {len(found)}")

    def run(lines: list[object], *options: str) -> tuple[int, list[str], str]:
        Path("jobs").write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        model = () if "--model" in options else ("--model", "demo")
        code = run_program(monkeypatch, "batch", "jobs", "--dry-run", *model, *options)
        out, err = capsys.readouterr()
        assert [path.name for path in tmp_path.iterdir() if path.suffix == ".run"] == []
        return code, out.splitlines(), err

    return run


def test_each_line_is_a_request_over_what_was_typed_for_all(dry: Run) -> None:
    named = ("-o", "o/{line}-{seed}-{width}x{height}x{num_frames}-{steps}-{guidance_scale}.mp4")
    lines = [
        "rain",
        {"prompt": "rain", "width": 96, "guidance": {"video": {"guidance_scale": 2.5}}, "seed": "1..2"},
        {"prompt": "rain", "aspect": "1:1", "resolution": "64p", "duration": "1s", "sigmas": [1, 0.5, 0]},
        {"prompt": "rain", "output": "o/own.mp4", "seed": [8, 9]},
    ]
    code, clips, err = dry(lines, "--seed", "7", "--steps", "4", "--guidance-scale", "3", *named)
    assert (code, clips) == (
        0,
        [
            "o/1-7-128x128x49-4-3.mp4",
            "o/own-s8.mp4",
            "o/own-s9.mp4",
            "o/2-1-96x128x49-4-2.5.mp4",
            "o/2-2-96x128x49-4-2.5.mp4",
            "o/3-7-64x64x25-2-3.mp4",
        ],
    )
    assert "jobs: 6 to do" in err


def test_a_size_or_length_of_a_line_wins_in_any_words(dry: Run) -> None:
    lines = [
        {"prompt": "a", "width": 64, "num_frames": 9},
        {"prompt": "b", "aspect": "1:1", "duration": "1s"},
        "c",
    ]
    named = ("-o", "{line}-{width}x{height}x{num_frames}.mp4", "--model", "demo")
    assert dry(lines, "--resolution", "96p", "--duration", "2s", *named)[1] == [
        "1-64x128x9.mp4",
        "2-96x96x25.mp4",
        "3-96x96x49.mp4",
    ]
    assert dry(lines, "--width", "32", "--height", "32", "--num-frames", "17", *named)[1] == [
        "1-64x32x9.mp4",
        "2-128x128x25.mp4",
        "3-32x32x17.mp4",
    ]


def test_a_result_has_each_value_but_empty_ones() -> None:
    result = Result(1, DONE, ("rain.mp4",), seed=0, seconds=2.0)
    assert json.loads(result.as_json()) == {
        "line": 1,
        "status": "done",
        "clips": ["rain.mp4"],
        "seed": 0,
        "seconds": 2.0,
    }
    assert json.loads(Result(2, OPEN).as_json()) == {"line": 2, "status": "to do"}


def test_how_long_it_takes_is_asked_once_for_jobs_that_take_as_long(dry: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[int, int]]()

    def expect(plans: Sequence[tuple[Plan, int]], product: Product) -> str:
        asked.extend((plan.stages[0].steps, number) for plan, number in plans)
        return "an hour"

    monkeypatch.setattr(open_jobs, "expected_time_of_jobs", EXPECTED_TIME)
    monkeypatch.setattr(open_jobs, "expected_times", expect)
    lines = ["rain", {"prompt": "fog", "num_inference_steps": 2}, "snow", {"prompt": "hail", "lora": ["gone.st"]}]
    assert "\ntime: an hour\n" in f"\n{dry(lines, '--model', 'demo')[2]}"
    assert sorted(asked) == [(2, 1), (20, 2)]


def test_a_dry_run_says_what_the_run_would_refuse(dry: Run) -> None:
    """Line by line."""
    lines = [
        {"prompt": "a red ball"},
        {"prompt": "b", "lora": ["gone.safetensors"]},
        {"prompt": "c", "stg_blocks": [99]},
        {"prompt": "d", "model": "gone/model"},
        {"prompt": "e", "width": 16384, "height": 16384},
        {"prompt": "f", "max_sequence_length": 2000},
        {"prompt": "g", "lora": ["gone.safetensors"]},
        {"prompt": "h", "conditions": [{"path": "jobs"}]},
        {"prompt": "a blue ball"},
    ]
    code, out, _ = dry(lines, "-o", "{line}.mp4", "--json")
    results = {result["line"]: result for result in map(json.loads, out)}
    assert (code, [line for line, result in results.items() if result["status"] == "to do"]) == (5, [1, 9])
    assert results[2]["error"] == results[7]["error"] == "there is no file gone.safetensors"
    assert results[3]["error"].startswith("STG block 99 does not exist")
    assert "gone/model is not in the local cache" in results[4]["error"]
    assert results[5]["error"].startswith("this does not fit: to")
    assert re.fullmatch(r'("\w+": ("\w+"|\d+)(, )?)+ in the line', results[5]["hint"])
    assert "max_sequence_length 2000 is more than the text encoder's" in results[6]["error"]
    assert results[8]["error"].startswith("jobs is no image")


@pytest.mark.parametrize(
    ("options", "own", "nearest"),
    [
        ("", {"output": "../x.mp4"}, '"output": "out/x.mp4"'),
        ("", {"output": "x.mp4"}, '"output": "out/x.mp4"'),
        ("", {"output": "out/link/x.mp4"}, '"output": "out/x.mp4"'),
        ("", {"save_latents": "/etc/x.safetensors"}, '"save_latents": "out/x.safetensors"'),
        ("", {"base_output_directory": "~"}, '"base_output_directory": "out"'),
        ("--set base_output_directory=mine", {"output": "out/x.mp4"}, '"output": "mine/x.mp4"'),
        ("-o a/b-{seed}/c.mp4", {"output": "x.mp4"}, '"output": "a/x.mp4"'),
    ],
)
def test_a_line_writes_into_the_output_folder_alone(
    dry: Run, tmp_path: Path, options: str, own: dict[str, str], nearest: str
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/link").symlink_to("/")
    line = {"prompt": "rain", "seed": 1, **own}
    code, clips, err = dry([line], *options.split())
    assert (code, clips) == (2, [])
    assert f"error: line 1: `{next(iter(own))}` is outside of the output folder " in err
    assert f"hint: nearest: {nearest}; or --unsafe-paths, " in err
    assert dry([{**line, **json.loads(f"{{{nearest}}}")}], *options.split())[0] == 0
    if "output" in own and "link" not in own["output"]:
        assert dry([line], *options.split(), "--unsafe-paths")[:2] == (0, [own["output"]])


def test_several_hosts_are_told_to_share_the_jobs() -> None:
    jobs = SimpleNamespace(session=SimpleNamespace(hosts=ProcessGroup(0, 2)))
    with pytest.raises(UsageError, match="several hosts cannot make a batch together") as caught:
        batch.make_jobs(jobs, [])
    assert "--shard I/N" in caught.value.hint


def test_shapes_follow_each_other_and_shards_share_the_jobs(dry: Run) -> None:
    lines = [{"prompt": str(number), "width": 64 + 32 * (number % 2)} for number in range(5)]
    named = ("-o", "{line}.mp4")
    assert dry(lines, *named)[1] == ["1.mp4", "3.mp4", "5.mp4", "2.mp4", "4.mp4"]
    shards = [dry(lines, *named, "--shard", f"{shard}/3")[1] for shard in range(3)]
    assert shards == [["1.mp4", "4.mp4"], ["2.mp4", "5.mp4"], ["3.mp4"]]


def test_the_tasks_of_a_job_array_share_the_jobs(dry: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "JOB_"))]:
        monkeypatch.delenv(name)
    code, clips, err = dry(["rain"], "--shard", "auto")
    assert (code, clips) == (2, [])
    assert "elsewhere it is --shard I/N\nhint: " in err
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "2")
    shards = []
    for task in range(2):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(task))
        code, clips, err = dry(list("abcde"), "-o", "{line}.mp4", "--shard", "auto")
        assert (code, f"--shard {task}/2\n" in err) == (0, True)
        shards.append(clips)
    assert shards == [["1.mp4", "3.mp4", "5.mp4"], ["2.mp4", "4.mp4"]]


def test_a_job_without_a_seed_keeps_its_own(dry: Run) -> None:
    first, second = dry(["rain", "snow"])[1], dry(["snow", "rain"])[1]
    assert sorted(first) == sorted(second)
    assert first[0].startswith("out/rain-demo-s")


def test_what_is_done_is_skipped(dry: Run, tmp_path: Path) -> None:
    spec = read_spec(prompt="rain", seed=3, output="rain.mp4", model="demo")
    (tmp_path / "rain.mp4").touch()
    record_path(tmp_path / "rain.mp4").write_text(to_yaml(replace(spec, recipe="one_stage", num_inference_steps=30)))
    named, job = ("-o", "{prompt}.mp4"), {"prompt": "rain", "seed": 3}
    assert dry([job, "snow"], *named)[1] == ["snow.mp4"]
    for other, what in (
        ({"seed": 4}, "another `seed`"),
        ({"guidance": {"video": {"stg_scale": 2}}}, "`guidance.video.stg_scale` was left open"),
    ):
        code, clips, err = dry([{**job, **other}, "snow"], *named)
        assert (code, clips) == (5, ["snow.mp4"])
        assert f"line 1: rain.mp4 exists, and is of another request: {what}\n" in err
    assert dry([job], *named, "--force")[1] == ["rain.mp4"]
    record_path(tmp_path / "rain.mp4").write_text("{")
    assert dry([job], *named)[:2] == (2, [])


def test_a_long_pipe_takes_no_more_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of requests that are skipped or refused."""
    monkeypatch.chdir(tmp_path)
    Path("rain.mp4").touch()
    Path("rain.yaml").write_text(to_yaml(read_spec(prompt="rain", seed=3, model="demo")))
    lines = (b'{"prompt": "rain", "seed": 3, "output": "rain.mp4"}\n', b'{"prompt": 1, "seed": x}\n')
    counts = list[int]()

    def arriving() -> Iterator[bytes]:
        for number in range(3000):
            if number in (1000, 2900):
                gc.collect()
                counts.append(len(gc.get_objects()))
            yield lines[number % 20 > 0]
        yield b""

    pipe = arriving()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=SimpleNamespace(readline=lambda size: next(pipe))))
    code = run_program(monkeypatch, "batch", "-", "--model", "demo", "-o", "{seed}.mp4", "--json")
    out, err = capsys.readouterr()
    assert (code, out.count('"skipped"'), out.count('"failed"')) == (5, 150, 2850)
    assert "jobs: 150 skipped, 2850 failed\n" in err
    assert counts[1] - counts[0] < 1000


def test_a_broken_line_is_named_and_the_others_are_jobs(dry: Run) -> None:
    code, clips, err = dry(["rain", {"prompt": "x", "heigth": 3}, '{"a"', {"compile_cache": "x"}], "-o", "{line}.mp4")
    assert (code, clips) == (5, ["1.mp4"])
    assert "error: 3 failed, 1 to do; line 2: unknown key `heigth`; closest: `height`\n" in err
    assert "line 3: this is no JSON object: Expecting ':' delimiter\nhint: or: `weights`; `ltx2 config show`" in err
    assert "   4  failed        `compile_cache` is not taken from a job: programs are code" in err


@pytest.mark.parametrize("dry_run", [True, False])
def test_all_broken_lines_are_listed(
    dry: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dry_run: bool
) -> None:
    """Also where there are no others; the exit code and the error are those of the first."""
    code, clips, err = dry(["{", {"prompt": "x", "heigth": 3}, "7"])
    if not dry_run:
        code = run_program(monkeypatch, "batch", "jobs", "--model", "demo")
        out, err = capsys.readouterr()
        clips = out.splitlines()
    assert (code, clips) == (2, [])
    rows = [line.split()[:2] for line in err.splitlines() if line.split()[1:2] == ["failed"]]
    assert rows == [["1", "failed"], ["2", "failed"], ["3", "failed"]]
    assert "unknown key `heigth`" in err
    assert "\njobs: 3 failed\nerror: line 1: this is no JSON object" in err


@pytest.mark.parametrize(
    ("lines", "options", "sentence"),
    [
        (
            ["rain", "snow"],
            "-o a.mp4",
            "lines 1 and 2 both make a.mp4\nhint: -o 'out/{prompt:.40}-{seed}-{line}.mp4'",
        ),
        (["rain", "rain"], "", "lines 1 and 2 both make out/rain-demo-s"),
        (["rain"], "-o a.mp4 --seed 1,2", "line 1 makes a.mp4 of the seeds 1 and 2\nhint: -o 'out/{prompt:.40}-{seed}"),
        (
            ["rain", {"prompt": "fog", "save_latents": "out/a"}, {"prompt": "r", "save_latents": "./out/a"}],
            "",
            "lines 2 and 3 bo",
        ),
        (
            [{"prompt": "rain", "seed": 0, "num_videos": 2}, {"prompt": "rain", "seed": 1}],
            "",
            "lines 1 and 2 both make",
        ),
        (["rain"], "-o {promt}.mp4", "-o '{promt}.mp4': unknown field `promt`; closest: `prompt`\nhint: known: `line`"),
        (["rain"], "--shard 2/2", "--shard 2/2: shards count from 0"),
        (["rain"], "--set heigth=3", "--set 'heigth=3': unknown key `heigth`; closest"),
        (["rain"], "--set height=33", "line 1: height 33 is not a multiple of 32"),
        (["{", "{"], "", "line 1: this is no JSON object"),
        (
            [{"conditions": [{"path": "a.mp4", "kind": "clip", "regenerate": [1, 2, 3]}]}],
            "",
            "line 1: `conditions` is [{'path'",
        ),
        (["{", "rain"], "--fail-fast", "line 1: this is no JSON object"),
        (["rain", "\0"], "", "jobs is not text in UTF-8\nhint: a prompt or a JSON object of"),
        (["rain"], "--num-processes 1 --config none.yaml", "none.yaml cannot be read"),
        (["rain"], "--preview jobs", "jobs is read, and would be overwritten"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_made(
    dry: Run, lines: list[object], options: str, sentence: str
) -> None:
    code, clips, err = dry(lines, *options.split())
    assert (code, clips) == (2, [])
    assert f"error: {sentence}" in err


AS_JSON = "a prompt like this: {"
FILES = {  # what a file of jobs may be: its content, the prompts of its jobs, and what is said of the rest
    "empty": (b"", [], "jobs: no jobs"),
    "only comments": (b"# one\n  # two\n\n", [], "jobs: no jobs"),
    "comments": (b"# weather\nrain\n#snow\n", ["rain"], ""),
    "a byte-order mark": (b'\xef\xbb\xbf{"prompt": "rain"}', ["rain"], ""),
    "two of them": (b"\xef\xbb\xbfrain\n\xef\xbb\xbfsnow", ["rain", "snow"], ""),
    "Windows": (b"rain\r\n\r\nsnow\r\n", ["rain", "snow"], ""),
    "old Macs": (b"rain\rsnow\r", ["rain", "snow"], ""),
    "separators": ("rain\u2028snow\u0085hail".encode(), ["rain-snow-hail"], ""),
    "Latin-1": (b"b\xe4r", [], "jobs is not text in UTF-8\nhint: a prompt or"),
    "UTF-16": ("rain".encode("utf-16"), [], "jobs is not text in UTF-8"),
    "NUL": (b"rain\0", [], "jobs is not text in UTF-8"),
    "a picture": (b"\x89PNG\r\n\x1a\n", [], "jobs is not text in UTF-8"),
    "a huge line": (b"rain\n" + b"a" * 1_000_001, ["rain"], "line 2: it has more than 1,000,000 bytes"),
    "a long prompt": (b"rain " * 20_000, ["rain-rain-rain"], ""),
    "an array": (b'["rain", {"prompt": "snow"},\n "a \\"fox\\""]', ["rain", "snow", "a-fox"], ""),
    "an array in lines": (b'# mine\n[\n{"prompt": "rain"},\n"snow"\n]\n', ["rain", "snow"], ""),
    "an empty array": (b"[]", [], "jobs: no jobs"),
    "an item of another kind": (b'["rain", 7, null, [1]]', ["rain"], "item 2: `7` is no prompt and no JSON object"),
    "a broken item": (b'["rain",\n{"prompt": snow}]', [], "jobs, line 2: this is no JSON array: Expecting value"),
    "no comma": (b'["rain"\n"snow"]', [], "jobs, line 2: this is no JSON array: Expecting ',' delimiter"),
    "an array with a trailing comma": (b'["rain", ]', [], "line 1: this is no JSON array: Expecting value"),
    "an array that ends early": (b'["rain"', [], "jobs, line 1: this is no JSON array"),
    "two arrays": (b'["rain"]\n["snow"]', [], "jobs, line 2: this is no JSON array: Extra data"),
    "a deep array": (b"[" * 100_000, [], "jobs is no JSON array of jobs: it is nested too deep"),
    "brackets": (b"[close up] rain", [], 'a prompt that begins so is given as JSON: {"prompt": "[close up] rain"}'),
    "a closing bracket": (b"rain\n]\n}", ["rain"], "line 2: `]` is no prompt and no JSON object"),
    "a text": (b'"rain"\n"fog," she says', ["rain", "fog-she-says"], ""),
    "an item with its comma": (
        b'"rain",',
        [],
        'item of a JSON array that is not whole\nhint: without the comma: "rain"',
    ),
    "an object in lines": (b'{\n"prompt": "rain",\n}', [], "line 1: this is no JSON object: Expecting property name"),
    "a comma behind an object": (b'{"prompt": "rain"},\nsnow', ["snow"], "line 1: this is no JSON object: Extra data"),
    "a key twice": (b'{"prompt": "rain", "prompt": "snow"}', [], "line 1: the key `prompt` is there twice"),
    "a key twice, deeper": (b'{"guidance": {"video": 1, "video": 2}}', [], "the key `video` is there twice"),
    "a key that is no text": (b'{1: "rain"}', [], "this is no JSON object: Expecting property name"),
    "an empty key": (b'{"": "rain"}', [], "line 1: unknown key ``"),
    "no prompt": (b'{"seed": 3}', [], "the prompt is empty"),
    "a prompt of null": (b'{"prompt": null}', [], "`prompt` is None; expected text"),
    "NaN": (b'{"prompt": "rain", "fps": NaN}', [], "fps nan is not in 1 to 240"),
    "infinity": (b'{"prompt": "rain", "seed": 1e999}', [], "`seed` is inf; expected"),
    "thousands of digits": (b'{"seed": ' + b"9" * 5000 + b"}", [], "it is too deep, or has a huge number"),
    "a deep value": (b'{"prompt": "rain", "lora": ' + b"[" * 40 + b"]" * 40 + b"}", [], "nested more than 32 deep"),
    "a very deep value": (b'{"a":' * 100_000, [], "this is no JSON object: it is too deep"),
    "a surrogate": (b'{"prompt": "\\ud800"}', [], "is not text in UTF-8"),
    "a key of no line": (b'{"prompt": "rain", "provenance": {}}', [], "unknown key `provenance`"),
    "numbers": (b"7\n-1.5e3\nnull\ntrue\n1917, a war", ["1917-a-war"], "line 1: `7` is no prompt"),
    "a YAML list": (b"- prompt: a fox\n- a bear", [], "line 1: this is YAML, and jobs are prompts or JSON"),
    "YAML": (
        b"---\nprompt: a fox\nseed: 3",
        [],
        "line 1: this is YAML, and jobs are prompts or JSON\nhint: leave",
    ),
    "a key": (b"prompt: a fox", [], 'nearest: {"prompt": "a fox"}; ' + AS_JSON),
    "a word and a colon": (b"Night: a fox\nfog: grey", ["night-a-fox", "fog-grey"], ""),
    "Markdown": (b"```\nrain\n```", ["rain"], "line 1: ````` is no prompt"),
    "a folder": ("mkdir jobs", [], "jobs is a folder, not a file"),
    "a pipe": ("mkfifo jobs", [], "jobs is a pipe or a device, not a file"),
    "a device": ("ln -s /dev/zero jobs", [], "jobs is a pipe or a device, not a file"),
    "nothing": ("true", [], "jobs cannot be read: No such file or directory"),
}


@pytest.mark.parametrize(("content", "prompts", "sentence"), FILES.values(), ids=FILES)
def test_any_file_is_jobs_or_is_refused_in_a_sentence(
    content: bytes | str,
    prompts: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(open_jobs, "expected_time_of_jobs", lambda jobs, found: "")
    if isinstance(content, bytes):
        Path("jobs").write_bytes(content)
    else:
        run(content.split(), check=True)
    code = run_program(monkeypatch, "batch", "jobs", "--dry-run", "-o", "{prompt:.14}.mp4", "--model", "demo")
    out, err = capsys.readouterr()
    assert [name.removesuffix(".mp4") for name in out.splitlines()] == prompts
    assert sentence in err
    refused = "error: " in err
    assert code == (5 if refused and prompts else 2 if refused else 0)
    assert "Traceback" not in err
    assert "not foreseen" not in err
    assert len(err[err.find("error: ") :].splitlines()) <= 3
    assert [path.name for path in tmp_path.iterdir()] in (["jobs"], [])
