"""`ltx2 batch` with real networks: loaded once, compiled once for a shape; each clip as it is made alone."""

import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import jax
import numpy as np
import pytest
import yaml
from PIL import Image
from safetensors.numpy import load_file

from clips import ALL_ON, Case, Checkpoint, Size, plan_of
from disks import small_disk
from live_bytes import LiveBytes, Sample, check_live_bytes
from loras import ORIGINAL, write_lora
from ltx2_cli.core.components import Components
from ltx2_cli.core.run import open_components
from ltx2_cli.core.run_saver import RunSaver
from ltx2_cli.core.state import RunState
from ltx2_cli.core.write import write
from ltx2_cli.errors import MAKE_ROOM, RunError
from ltx2_cli.parallel.devices import DeviceMemory
from ltx2_cli.plan.inputs import network_values
from ltx2_cli.plan.resolve import Plan, resolve
from ltx2_cli.request.profiles import read_spec, to_yaml
from ltx2_cli.runs.worker import Run as PlannedRun
from ltx2_cli.runs.worker import Worker
from ltx2_cli.weights.digests import header_digest
from media.test_videos import write_lossless
from other_process import other_process
from program import run_program
from sounds import tone, write_tone

SMALL = Case(Size(9, 64, 64, 24.0), 2, ALL_ON.video, ALL_ON.audio, (0,))
KEYS = (
    *("model", "height", "width", "num_frames", "fps", "num_inference_steps", "dtype", "guidance", "stg_blocks"),
    *("text_encoder_dtype", "max_sequence_length", "compat"),
)
NONE = DeviceMemory(0, 0, 0)
ROOM = 2**20  # bytes of a disk for some clips
IN_CONTEXT = {"reference_downscale_factor": "2"}  # metadata of a LoRA that follows references
Results = list[dict[str, Any]]
T = TypeVar("T")
Run = Callable[..., tuple[int, Results, str]]


@pytest.fixture
def batch(
    checkpoint: Checkpoint,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Runs `ltx2 batch` over lines, in an empty folder: exit code, results in the order of the lines, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    values = yaml.safe_load(to_yaml(plan_of(checkpoint, SMALL, 3).spec))
    Path("small.yaml").write_text(yaml.safe_dump({"sharding": "single", **{key: values[key] for key in KEYS}}))

    def run(lines: list[object], *options: str, jobs: str = "jobs") -> tuple[int, Results, str]:
        Path("jobs").write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        named = ("--config", "small.yaml", "-o", "{line}-{seed}.mp4")
        code = run_program(monkeypatch, "batch", jobs, *named, "--json", *options)
        out, err = capsys.readouterr()
        return code, sorted(map(json.loads, out.splitlines()), key=lambda result: result["line"]), err

    return run


def loaded(err: str) -> list[str]:
    return [line.split(":")[0].removeprefix("load ") for line in err.splitlines() if line.startswith("load ")]


def fingerprints(record: str) -> object:
    return yaml.safe_load(Path(record).read_text())["provenance"]["latents"]


def test_networks_are_loaded_once_and_a_shape_is_compiled_once(batch: Run, compilations: list[str]) -> None:
    """A broken line is named, and the others are made; the second start makes nothing, without jax."""
    code, results, err = batch([{"prompt": "rain", "seed": 3}], "--preview", "preview.png")
    assert (code, results[0]["status"], results[0]["clips"]) == (0, "done", ["1-3.mp4"])
    assert "time: unknown: first run of this shape here\n" in err
    preview = Path("preview.png").read_bytes()
    alone = resolve(replace(read_spec(prompt="rain", seed=3, config="small.yaml"), output="alone.mp4"))
    assert [path.name for path, _ in write(alone, open_components(alone))] == ["alone.mp4"]
    assert fingerprints("1-3.yaml") == fingerprints("alone.yaml")
    jax.jit(lambda x: x + 2)(1)
    assert compilations  # a program is noticed
    compilations.clear()
    other = {"guidance": {"video": {"guidance_scale": 2.0}}, "num_inference_steps": 3}
    lines = [{"prompt": "rain", "seed": 3}, "snow", {"prompt": "fog", **other}, "{", {"prompt": "hail", "seed": "4..5"}]
    code, results, err = batch(lines, "-v", "--preview", "preview.png")
    assert code == 5
    assert re.search("^time: about .*, as the last run of this shape here$", err, re.MULTILINE)
    assert Path("preview.png").read_bytes() != preview
    Path("preview.png").unlink()
    assert [result["status"] for result in results] == ["skipped", "done", "done", "failed", "done", "done"]
    assert "error: 4 done, 1 skipped, 1 failed; line 4: this is no JSON object: Expecting property name" in err
    assert not compilations
    assert sorted(loaded(err)) == ["audio vae", "connectors", "text encoder", "transformer", "vae", "vocoder"]
    assert sorted(path.suffix for path in Path().iterdir()) == ["", *[".mp4"] * 6, *[".yaml"] * 7]
    code, results, err = batch(lines[:3], "-v")
    assert (code, {result["status"] for result in results}) == (0, {"skipped"})
    assert "start:" not in err


def test_a_terminal_shows_which_clip_it_is(batch: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """And after the first one, how long all others take."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    err = batch([{"prompt": text, "seed": 3} for text in ("rain", "snow")])[2]
    assert "clip 1 of 2: " in err
    assert re.search(r"clip 2 of 2, [\d.]+ m?s left: ", err)


def test_a_request_that_a_pipe_has_had_is_skipped(batch: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where both lines are there at once; another request for the same clip fails."""
    lines = [{"prompt": "rain", "seed": 3}, {"prompt": "rain", "seed": 3}, {"prompt": "snow", "seed": 3}]
    text = "".join(f"{json.dumps({**line, 'output': 'a.mp4'})}\n" for line in lines)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    code, results, err = batch([], jobs="-")
    assert (code, [result["status"] for result in results]) == (5, ["done", "skipped", "failed"])
    assert results[2]["error"] == "a.mp4 exists, and is of another request: another `prompt`"
    assert "jobs: 1 done, 1 skipped, 1 failed\n" in err


def test_pictures_are_read_when_a_job_is_made(batch: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of jobs that wait are not in memory. One that has changed since fails its job."""
    read_texts, paths = Worker._read_texts, [Path(f"{number}.png") for number in range(2)]
    for path in paths:
        Image.new("RGB", (64, 64), "red").save(path)

    def change(worker: Worker, runs: Sequence[PlannedRun]) -> None:
        assert [run.plan.input_videos for run in runs] == [()] * 2
        read_texts(worker, runs)
        Image.new("RGB", (64, 64), "blue").save(paths[1])

    monkeypatch.setattr(Worker, "_read_texts", change)
    code, results, _ = batch([{"prompt": "rain", "seed": 3, "conditions": [{"path": str(path)}]} for path in paths])
    assert (code, [result["status"] for result in results]) == (5, ["done", "failed"])
    assert results[1]["error"] == "1.png is another image than that of the record"


@pytest.fixture
def inputs(checkpoint: Checkpoint, tmp_path: Path) -> dict[str, Path]:
    """A file of each kind that a clip is made of."""
    shutil.copytree(checkpoint.folder, tmp_path / "model")
    frames, media = np.random.default_rng(1).integers(0, 256, (9, 64, 64, 3), np.uint8), tmp_path / "media"
    media.mkdir()
    Image.fromarray(frames[0]).save(media / "her.png")
    return {
        "conditions: image": media / "her.png",
        "conditions: video": write_lossless(media / "her.mov", frames),
        "conditions: reference": write_lossless(media / "pose.mov", frames),
        "audio": write_tone(media / "song.wav", tone(0.5, 16000), 16000),
        "lora": write_lora(media / "pose.safetensors", checkpoint.pipeline, ORIGINAL, 6, IN_CONTEXT),
        "transformer": next((tmp_path / "model" / "transformer").glob("*.safetensors")),
        "text_encoder": next((tmp_path / "model" / "text_encoder").glob("*.safetensors")),
    }


@pytest.mark.slow
def test_a_clip_is_done_only_of_the_same_files(batch: Run, inputs: dict[str, Path]) -> None:
    """Nothing is made again where nothing has changed, and a clip of other files is not overwritten."""
    conditions = [
        {"path": str(path), "kind": key.removeprefix("conditions: "), "frame": 4 * ("video" in key)}
        for key, path in inputs.items()
        if key.startswith("conditions")
    ]
    others = {"audio": str(inputs["audio"]), "lora": [str(inputs["lora"])], "model": "model"}
    line = {"prompt": "rain", "seed": 3, "conditions": conditions, **others}
    assert batch([line])[1][0]["status"] == "done"
    clip, record = Path("1-3.mp4").read_bytes(), Path("1-3.yaml").read_text()
    for typed in ([], ["--force"]):
        code, results, err = batch([line], *typed, "--dry-run")
        assert (code, results[0]["status"], loaded(err)) == (0, "to do" if typed else "skipped", [])
    words = {key: key.split(":")[0] for key in inputs} | {"lora": "media/pose", "text_encoder": "text_encoder/model"}
    for key, path in inputs.items():
        before, times = path.read_bytes(), path.stat()
        path.write_bytes(before[:-4] + before[:4])
        code, results, err = batch([line])
        assert (code, results[0]["status"], loaded(err)) == (2, "failed", []), key
        assert "1-3.mp4 exists, and is of another request: " in results[0]["error"]
        assert words[key] in results[0]["error"]
        assert results[0]["hint"].startswith("--force overwrites it")
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    for change in ({"prompt": "snow"}, {"seed": 4}, {"width": 96}, {"conditions": conditions[:2], "lora": []}):
        assert batch([{**line, "output": "1-3.mp4", **change}])[1][0]["status"] == "failed", change
    assert (Path("1-3.mp4").read_bytes(), Path("1-3.yaml").read_text()) == (clip, record)
    moved = {**line, "audio": str(shutil.copy(inputs["audio"], "moved.wav"))}
    assert batch([moved])[1][0]["status"] == "skipped"
    # a record of an older version, and one by when weights were not hashed: these have a header's digest
    values = yaml.safe_load(record)
    values["conditions"] = [{**condition, "sha256": None} for condition in values["conditions"]]
    name = "transformer/diffusion_pytorch_model.safetensors"
    files = {**values["provenance"]["files"], name: header_digest(inputs["transformer"])}
    for of_record in (files, {}):
        text = {**values, "provenance": {**values["provenance"], "files": of_record}}
        Path("1-3.yaml").write_text(yaml.safe_dump(text))
        assert batch([line])[1][0]["status"] == "skipped"
        for key, word in (("conditions: image", "another `conditions`"), ("transformer", "transformer/diffusion")):
            times = inputs[key].stat()
            os.utime(inputs[key], (time.time() + 9,) * 2)
            result = batch([line])[1][0]
            assert (result["status"], word in result["error"]) == ("failed", True)
            os.utime(inputs[key], ns=(times.st_atime_ns, times.st_mtime_ns))


def test_networks_whose_files_have_changed_are_loaded_again(
    batch: Run, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a LoRA that is written anew under its name, between two jobs of a pipe."""
    (weights,) = (checkpoint.folder / "vae").glob("*.safetensors")
    notice, times = Worker._notice_changes, iter((1, 1, 2, 2))

    def touch(worker: Worker, plan: Plan) -> None:
        os.utime(weights, (next(times),) * 2)
        notice(worker, plan)

    monkeypatch.setattr(Worker, "_notice_changes", touch)
    monkeypatch.setattr("ltx2_cli.runs.worker.TEXTS_AT_ONCE", 1)
    code, _, err = batch([{"prompt": text, "seed": 3} for text in ("rain", "snow", "fog", "hail")], "-v")
    assert (code, err.count(f"{weights} has changed: the networks are loaded again\n")) == (0, 1)
    assert loaded(err).count("vae") == 2


def test_what_was_interrupted_is_gone_on_with(batch: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = RunSaver._measure

    def stop(saver: RunSaver, progress: RunState) -> None:
        measure(saver, progress)
        saver.stop.requested = saver.path.name == "2-3.run" and progress.step == 1

    lines = [{"prompt": text, "seed": 3} for text in ("rain", "snow", "fog")]
    with monkeypatch.context() as patch:
        patch.setattr(RunSaver, "_measure", stop)
        code, results, err = batch(lines, "--save-run")
    assert (code, [result["line"] for result in results]) == (130, [1])
    assert err.endswith("stopped after step 1 of 2 of stage 1\nhint: the same command goes on; jobs that are done: 1\n")
    kept = Path("2-3.run").read_bytes()
    code, results, err = batch(lines, "--resumable", "--dry-run")
    assert (code, [result["status"] for result in results]) == (0, ["skipped", "to do", "to do"])
    assert [line for line in err.splitlines() if "goes on" in line] == ["line 2 goes on from 2-3.run"]
    assert "goes on" not in batch(lines, "--dry-run", "--force")[2]
    code, results, err = batch([{**line, "fps": 12} for line in lines], "--dry-run")
    assert [result["status"] for result in results] == ["failed", "failed", "to do"]
    assert results[1]["error"].startswith("2-3.run is an unfinished run")
    assert Path("2-3.run").read_bytes() == kept
    code, results, err = batch(lines, "--save-run")
    assert (code, [result["status"] for result in results]) == (0, ["skipped", "done", "done"])
    assert [line.split(":")[0] for line in err.splitlines() if "step" in line] == ["1 step", "2 steps"]
    once = fingerprints("2-3.yaml")
    assert batch(lines, "--force")[1][1]["status"] == "done"
    assert fingerprints("2-3.yaml") == once
    assert not [*Path().glob("*.run"), *Path().glob(".*")]


@pytest.mark.slow
def test_networks_that_do_not_fit_together_take_turns(batch: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all jobs: the text of each is read, then all are denoised, then all are decoded."""
    lines = [{"prompt": "rain", "seed": 3}, {"prompt": "snow", "seed": 3, "width": 96}]
    assert batch(lines)[0] == 0
    before = [fingerprints(f"{line}-3.yaml") for line in (1, 2)]
    samples = list[Sample]()
    monkeypatch.setattr("ltx2_cli.runs.worker.Timings", lambda report: LiveBytes(report, samples=samples))
    monkeypatch.setattr("ltx2_cli.runs.worker.available_memory", lambda plan: NONE)
    monkeypatch.setattr("ltx2_cli.runs.worker.decodes_beside", lambda plan: False)
    code, results, err = batch(lines, "--force", "-v")
    assert (code, [result["status"] for result in results]) == (0, ["done"] * 2)
    order = list(dict.fromkeys(line.split(":")[0] for line in err.splitlines() if ":" in line))
    stages = [name for name in order if name in ("encode text", "2 steps", "decode", "load transformer", "load vae")]
    assert stages == ["encode text", "load transformer", "2 steps", "load vae", "decode"]
    assert [loaded(err).count(name) for name in ("transformer", "vae", "vocoder")] == [1, 1, 1]
    assert [fingerprints(f"{line}-3.yaml") for line in (1, 2)] == before
    check_live_bytes(resolve(read_spec(config="1-3.yaml")), samples)


def test_what_others_make_or_have_made_is_left_alone(batch: Run) -> None:
    """A file of another request, one that a process is writing, one that a dead process left, and the file of jobs."""
    lines = [{"prompt": text, "seed": 3} for text in ("rain", "snow", "fog")]
    lines.append({"prompt": "dew", "seed": 3, "save_latents": "jobs"})
    Path("1-3.mp4").write_text("mine")
    with other_process(Path("2-3.mp4")), other_process(Path("3-3.mp4")) as dead:
        dead.kill()
        dead.wait()
        code, results, _ = batch(lines)
        assert [result["status"] for result in results] == ["failed", "elsewhere", "done", "failed"]
    assert results[0]["error"] == "1-3.mp4 exists"
    assert results[3]["error"] == "jobs is read, and would be overwritten"
    assert (code, Path("1-3.mp4").read_text()) == (5, "mine")


def test_a_clip_that_another_worker_begins_meanwhile_is_left_to_it(batch: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the jobs and the turn of its own."""
    read_texts = Worker._read_texts
    with ExitStack() as others:

        def begin_elsewhere(worker: Worker, runs: Sequence[PlannedRun]) -> None:
            read_texts(worker, runs)
            others.enter_context(other_process(Path("2-3.mp4")))

        monkeypatch.setattr(Worker, "_read_texts", begin_elsewhere)
        code, results, _ = batch([{"prompt": text, "seed": 3} for text in ("rain", "snow", "fog")])
    assert (code, [result["status"] for result in results]) == (0, ["done", "elsewhere", "done"])
    assert not Path("2-3.mp4").exists()


def used(more: int = 0) -> int:
    """The bytes of the blocks that are used in the folder `full`, and of some more."""
    disk = os.statvfs("full")
    return (disk.f_blocks - disk.f_bfree + more) * disk.f_frsize


def test_a_full_disk_ends_the_batch(batch: Run, tmp_path: Path) -> None:
    """Whichever file does not fit: no other job is begun, what was made stays, and the same command goes on. Where the
    disk takes nothing at all, no network is loaded."""
    lines = [{"prompt": text, "seed": 3, "output": f"full/{text}.mp4"} for text in ("rain", "snow", "fog")]
    elsewhere = [{**line, "output": f"{line['prompt']}.mp4"} for line in lines]
    with small_disk(tmp_path / "full", ROOM) as remount:
        assert batch(lines[:1])[0] == 0
        remount(f"size={used()}")
        code, results, err = batch(lines)
        assert (code, [result["status"] for result in results]) == (5, ["skipped", "failed", "failed"])
        assert results[1]["error"] == "cannot write full/snow.mp4: No space left on device"
        assert loaded(err) == []
        remount(f"size={used(4)}")
        code, results, err = batch(lines, "--resumable")
        assert (code, [result["status"] for result in results]) == (1, ["skipped", "failed"])
        assert results[1]["error"] == "cannot write full/snow.mp4: No space left on device"
        assert err.endswith(f"hint: {MAKE_ROOM}; then the same command goes on; jobs that are done: 0\n")
        remount(f"size={used(1)}")
        code, results, err = batch(elsewhere, "--preview", "full/preview.png")
        assert (code, [result["status"] for result in results]) == (1, ["done"])
        assert "error: cannot write full/preview.png: No space left on device\n" in err
        remount(f"size={ROOM}")
        code, results, _ = batch(lines)
        assert (code, [result["status"] for result in results]) == (0, ["skipped", "done", "done"])
        remount("ro")
        code, results, err = batch([*lines, {**lines[0], "seed": 4, "output": "full/other.mp4"}])
        assert (code, results[3]["status"], loaded(err)) == (5, "failed", [])
        assert results[3]["error"] == "cannot write full/other.mp4: Read-only file system"
        code, results, err = batch([{**lines[0], "output": f"full/{number}.mp4"} for number in range(2)])
        assert (code, [result["status"] for result in results], loaded(err)) == (2, ["failed"] * 2, [])


def test_a_folder_that_disappears_fails_its_job(batch: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = RunSaver._measure

    def remove(saver: RunSaver, progress: RunState) -> None:
        measure(saver, progress)
        if progress.step == 1:
            shutil.rmtree("there", ignore_errors=True)

    lines = [{"prompt": "rain", "seed": 3, "output": "there/rain.mp4"}, {"prompt": "snow", "seed": 3}]
    with monkeypatch.context() as patch:
        patch.setattr(RunSaver, "_measure", remove)
        code, results, _ = batch(lines)
    assert (code, [result["status"] for result in results]) == (5, ["failed", "done"])
    assert results[0]["error"] == "cannot write there/rain.mp4: No such file or directory"
    code, results, _ = batch(lines)
    assert (code, [result["status"] for result in results]) == (0, ["done", "skipped"])


def test_networks_that_are_not_the_same_are_loaded_again(checkpoint: Checkpoint) -> None:
    """Those of the denoiser with fewer streams, with other weights, of another type or at another place."""
    plan = plan_of(checkpoint, SMALL, 3, sharding="single")
    for other in ({"streams": "video"}, {"scan_layers": False}, {"dtype": "bfloat16"}, {"sharding": "trillium"}, {}):
        components = Components(plan)
        components.resident["transformer"] = plan.network("transformer")
        components.adopt(plan_of(checkpoint, SMALL, 4, **{"sharding": "single", **other}))
        assert ("transformer" in components.resident) is (other == {})
    others = {"checkpoint": "other", "text_encoder": "other", "lora": ("other",)}
    specs = [replace(plan.spec, **{key: value}) for key, value in others.items()]
    stages = [replace(plan.spec.second_stage, **{key: value}) for key, value in {"upsampler": "o", "lora": ()}.items()]
    specs += [replace(plan.spec, second_stage=stage) for stage in stages]
    assert len({network_values(spec) for spec in [plan.spec, replace(plan.spec, prompt="fog"), *specs]}) == 6


def save_latents(lines: Results, name: str) -> Results:
    return [{**line, "save_latents": f"{name}-{number}.safetensors"} for number, line in enumerate(lines, 1)]


def latents(name: str) -> np.ndarray:
    """Of the first four clips of that name, [clips, values]."""
    files = (load_file(path) for path in sorted(Path().glob(f"{name}-[1-4].safetensors")))
    return np.stack([np.concatenate([stream.ravel() for stream in file.values()]) for file in files])


@pytest.mark.slow
def test_jobs_that_are_denoised_in_a_batch_equal_each_alone(batch: Run) -> None:
    """Of eight devices, and alone of one. Four in batches of three, of which the last is filled up; one with a size of
    its own is made alone."""
    lines = [{"prompt": text, "seed": seed} for seed, text in enumerate(("rain", "snow", "fog", "rain"), 3)]
    own = {"prompt": "hail", "seed": 1, "num_frames": 1}
    options = "--negative-prompt", "snow"  # a prompt of one of them
    code, results, err = batch(save_latents([*lines, own], "alone"), *options, "--batch-size", "1")
    assert (code, "in batches" in err) == (0, False)
    assert yaml.safe_load(Path("1-3.yaml").read_text())["provenance"]["at_once"] == 1
    options = *options, "--batch-size", "3", "--sharding", "trillium", "--force", "-v"
    code, results, err = batch(save_latents([*lines, own], "batch"), *options)
    assert (code, [result["status"] for result in results]) == (0, ["done"] * 5)
    assert "4 jobs in batches of 3; their last bits may differ" in err
    print(err)
    assert [loaded(err).count(name) for name in ("transformer", "vae", "vocoder")] == [1, 1, 1]
    at_once = [yaml.safe_load(path.read_text())["provenance"]["at_once"] for path in sorted(Path().glob("?-?.yaml"))]
    assert at_once == [3, 3, 3, 3, 1]
    alone, together = latents("alone"), latents("batch")
    assert np.abs(alone[0] - alone[1:4]).max(axis=1).min() > 0.1
    np.testing.assert_allclose(together, alone, rtol=0, atol=2e-5 * np.abs(alone).max())


@pytest.mark.slow
def test_jobs_of_a_pipe_share_a_batch_where_its_size_is_typed(batch: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that have arrived the last batch is filled up: one program makes all. One alone is made alone."""
    by_two = "--batch-size", "2"
    for lines, options, wanted in ((3, by_two, [2] * 3), (1, by_two, [1]), (2, (), [1] * 2)):
        jobs = [{"prompt": "rain", "seed": seed, "num_inference_steps": 1} for seed in range(lines)]
        text = "".join(f"{json.dumps(job)}\n" for job in jobs)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
        code, results, _ = batch([], *options, "--force", jobs="-")
        assert (code, [result["status"] for result in results]) == (0, ["done"] * lines)
        records = [yaml.safe_load(Path(result["clips"][0]).with_suffix(".yaml").read_text()) for result in results]
        assert [record["provenance"]["at_once"] for record in records] == wanted


def stopped_at(name: str, monkeypatch: pytest.MonkeyPatch, run: Callable[[], T]) -> T:
    """A batch that is stopped after the first step of the job that keeps its progress in the file `name`."""
    measure = RunSaver._measure

    def stop(saver: RunSaver, progress: RunState) -> None:
        measure(saver, progress)
        if saver.path.name == name and progress.step == 1:
            saver.stop.requested = True

    with monkeypatch.context() as patch:
        patch.setattr(RunSaver, "_measure", stop)
        return run()


@pytest.mark.slow
@pytest.mark.parametrize(("line", "done", "kept"), [(2, [], [1, 2]), (3, [1, 2], [3])], ids=["first", "filled up"])
def test_an_interrupted_batch_is_gone_on_with_to_the_byte(
    batch: Run, line: int, done: list[int], kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its jobs are kept where it stopped. Networks that take turns in memory are loaded once."""
    lines = [{"prompt": text, "seed": 3} for text in ("rain", "snow", "fog")]
    options = "--batch-size", "2", "--save-run"
    code, results, err = stopped_at(f"{line}-3.run", monkeypatch, lambda: batch(lines, *options))
    assert (code, [result["line"] for result in results]) == (130, done)
    assert sorted(path.name for path in Path().glob("*.run")) == [f"{number}-3.run" for number in kept]
    goes_on = [f"line {number} goes on from {number}-3.run" for number in kept]
    assert [said for said in batch(lines, *options, "--dry-run")[2].splitlines() if "goes on" in said] == goes_on
    monkeypatch.setattr("ltx2_cli.runs.worker.decodes_beside", lambda plan: False)
    code, results, err = batch(lines, *options, "-v")
    assert (code, [result["status"] for result in results]) == (0, ["skipped"] * len(done) + ["done"] * (3 - len(done)))
    steps = [said.split(":")[0] for said in err.splitlines() if re.match("[0-9] step", said)]
    assert steps == (["1 step"] if done else ["1 step", "2 steps"])
    assert [loaded(err).count(name) for name in ("transformer", "vae")] == [1, 1]
    made = [fingerprints(f"{number}-3.yaml") for number in (1, 2, 3)]
    assert batch(lines, *options, "--force")[0] == 0
    assert [fingerprints(f"{number}-3.yaml") for number in (1, 2, 3)] == made
    assert not [*Path().glob("*.run"), *Path().glob(".*")]


def test_a_batch_size_that_is_typed_comes_before_that_of_an_interrupted_batch(
    batch: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"prompt": text, "seed": 3} for text in ("rain", "snow")]
    assert stopped_at("2-3.run", monkeypatch, lambda: batch(lines, "--batch-size", "2", "--save-run"))[0] == 130
    code, results, err = batch(lines, "--batch-size", "1", "--save-run")
    assert (code, [result["status"] for result in results]) == (0, ["done"] * 2)
    assert "line 1 is started over: it was one of 2 videos made at once, which may change its last bits" in err
    at_once = [yaml.safe_load(Path(f"{line}-3.yaml").read_text())["provenance"]["at_once"] for line in (1, 2)]
    assert at_once == [1, 1]


def test_jobs_whose_batch_fails_are_made_alone(batch: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"prompt": text, "seed": 3} for text in ("rain", "snow")]
    assert batch(lines, "--batch-size", "1")[0] == 0
    before = [fingerprints(f"{line}-3.yaml") for line in (1, 2)]

    def fail(*arguments: object) -> None:
        raise RunError("out of memory", "")

    monkeypatch.setattr("ltx2_cli.runs.advance_together.advance", fail)
    code, results, err = batch(lines, "--batch-size", "2", "--force")
    assert (code, [result["status"] for result in results]) == (0, ["done"] * 2)
    assert "lines 1, 2 failed in one batch, each is made alone: out of memory" in err
    assert [fingerprints(f"{line}-3.yaml") for line in (1, 2)] == before


def test_a_batch_that_does_not_fit_is_refused(batch: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"prompt": text, "seed": 3} for text in ("rain", "snow", "fog", "hail")]
    monkeypatch.setattr("ltx2_cli.runs.batch_size.available_memory", lambda plan: NONE)
    code, results, err = batch(lines, "--batch-size", "4")
    assert (code, results) == (3, [])
    assert re.search("^error: 4 jobs in a batch need .* of each device, 0 B are there$", err, re.MULTILINE)
    assert "hint: --batch-size 2\n" in err
    assert batch(lines, "--batch-size", "0")[0] == 2
