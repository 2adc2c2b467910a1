"""How long a run takes, as told by earlier ones: by their steps and clips, for the same shape alone."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from ltx2_cli import chips
from ltx2_cli.artifacts.outputs import Product
from ltx2_cli.chips import Chip
from ltx2_cli.core.report import Report, Timings
from ltx2_cli.estimate.estimate import estimate_plan
from ltx2_cli.plan.resolve import Plan, plan_offline
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.request.spec import Decoder
from ltx2_cli.runs.past_times import KEPT, SHAPES, expected_time, expected_times, format_seconds, past_runs, remember
from program import CACHE, cache_restored

CLIPS = Product.clips
SLOW = Chip("slow", ("cpu",), hbm_bytes=40e9, flops=1e9, hbm_bandwidth=1e9, link_bandwidth=1e9)
UNKNOWN = "unknown: first run of this shape here"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with cache_restored():
        jax.config.update(CACHE, True)
        yield tmp_path / "ltx2/timings"


def plan_of(**asked: object) -> Plan:
    spec = read_spec({"prompt": "rain", "model": "demo", "sharding": "single", "seed": 1, **asked})
    return plan_offline(spec, jax.devices()[:1])


@pytest.fixture(scope="module")
def plan() -> Plan:
    """One clip in 20 steps."""
    return plan_of()


def timings(denoising: Sequence[float], compiling: float = 0.0, clips: int = 1) -> Timings:
    """What was measured of a run whose clips take 3 s each, and whose text takes 4 s."""
    stages = [("encode text", 4.0), *(("denoise", seconds) for seconds in denoising)]
    stages += [("decode", 2.0), ("write", 1.0)] * clips
    return Timings(Report(), preparations=[("load vae", 1.0), ("compile denoise", compiling)], activities=stages)


def test_each_window_has_the_steps_of_its_stage() -> None:
    """The last one may be timed batch by batch; in other numbers of windows a clip has another shape."""
    plan = plan_of(num_frames=97, windows=3, seed=(1, 2))
    remember(plan, CLIPS, timings([30.0, 20.0, 10.0, 20.0], clips=2), total=90.0, cold=False)
    assert expected_time(plan, CLIPS) == "about 90 s, as the last run of this shape here"
    longer = plan_of(num_frames=97, windows=3, seed=(1, 2), num_inference_steps=40)
    assert expected_time(longer, CLIPS).startswith("about 170 s")
    assert expected_time(plan_of(num_frames=97, windows=2, seed=(1, 2)), CLIPS) == UNKNOWN


def test_a_run_takes_as_long_as_the_last_of_its_shape(plan: Plan):
    assert expected_time(plan, CLIPS) == UNKNOWN
    remember(plan, CLIPS, timings([40.0], compiling=2.0), total=60.0, cold=False)  # 2 s a step, 15 s else
    assert expected_time(plan, CLIPS) == "about 60 s, as the last run of this shape here"
    longer = replace(plan, stages=plan_of(num_inference_steps=30).stages)
    assert expected_time(longer, CLIPS).startswith("about 80 s")
    several = replace(plan, seeds=(1, 2, 3))  # three times 40 and 3 s
    assert expected_time(several, CLIPS).startswith("about 146 s")
    for seconds in (20.0, 60.0):
        remember(several, CLIPS, timings([seconds] * 3, 2.0, clips=3), total=3 * seconds + 9 + 15 + 2, cold=False)
    assert expected_time(plan, CLIPS) == "about 60 s, as the last 3 runs of this shape here"  # the median


def test_jobs_load_once_and_each_shape_is_compiled_once(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    longer, wide = replace(plan, stages=plan_of(num_inference_steps=30).stages), plan_of(width=64)
    jobs = [(plan, 2), (longer, 3)]  # 47 and 67 s with their text, 2 to compile, 11 else
    assert expected_times(jobs, CLIPS) == "unknown: 5 jobs have shapes that never ran here"
    remember(plan, CLIPS, timings([40.0], compiling=2.0), total=60.0, cold=False)
    assert expected_times(jobs, CLIPS) == "about 308 s, as the last run of this shape here"
    jobs.append((wide, 1))
    assert expected_times(jobs, CLIPS) == "at least 308 s; 1 jobs have shapes that never ran here"
    remember(wide, CLIPS, timings([20.0], compiling=3.0), total=50.0, cold=False)  # 27, 3 and 20 s
    assert expected_times(jobs, CLIPS) == "about 347 s, as the last 2 runs of these shapes here"
    assert expected_times([], CLIPS).startswith("unknown")
    monkeypatch.setattr(chips, "CHIPS", (SLOW,))
    unknown = expected_times([(plan_of(width=96), 2)], CLIPS)
    assert " by estimate, not measured on hardware, without loading and compiling; 2 jobs have shapes" in unknown


def test_other_shapes_are_not_compared(plan: Plan):
    remember(plan, CLIPS, timings([40.0]), total=60.0, cold=False)
    others = (
        {"width": 64},
        {"num_frames": 25},
        {"guidance.video.stg_scale": 0, "guidance.audio.stg_scale": 0},
        {"nag_scale": 11},
        {"segments": ["1s: snow"]},
        {"dtype": "bfloat16"},
        {"text_encoder_dtype": "bfloat16"},
        {"scan_layers": False},
    )
    assert {expected_time(plan_of(**other), CLIPS) for other in others} == {UNKNOWN}
    assert expected_time(replace(plan, spec=replace(plan.spec, decoder=Decoder.diffusion)), CLIPS) == UNKNOWN
    assert expected_time(plan, Product.latents) == UNKNOWN
    assert expected_time(plan_of(prompt="another", seed=9), CLIPS).startswith("about 60 s")


def test_what_was_compiled_is_not_compiled_again(plan: Plan):
    remember(plan, CLIPS, timings([40.0], compiling=100.0), total=160.0, cold=True)
    assert expected_time(plan, CLIPS).startswith("about 66 s")  # to read programs takes 6 % of compiling them
    assert expected_time(replace(plan, compile_cache="off"), CLIPS).startswith("about 160 s")
    remember(plan, CLIPS, timings([40.0], compiling=1.0), total=61.0, cold=False)
    assert expected_time(plan, CLIPS).startswith("about 61 s")
    jax.config.update(CACHE, False)
    assert expected_time(plan, CLIPS).startswith("about 160 s")


def test_two_stages_have_steps_of_their_own():
    plan = plan_of(recipe="two_stage")
    first, second = (stage.steps for stage in plan.stages)
    assert (first, second) == (20, 3)
    remember(plan, CLIPS, timings([40.0, 30.0]), total=90.0, cold=False)
    (run,) = past_runs(plan, CLIPS)
    assert run.steps == (2.0, 10.0)
    assert expected_time(replace(plan, seeds=(1, 2)), CLIPS).startswith("about 163 s")
    remember(plan, CLIPS, timings([40.0]), total=90.0, cold=False)  # it was interrupted
    assert len(past_runs(plan, CLIPS)) == 1
    twice = replace(plan, seeds=(1, 2))  # the second stage batch by batch, where decoders stay beside it, or at once
    for denoising in ([80.0, 30.0, 30.0], [80.0, 60.0]):
        remember(twice, CLIPS, timings(denoising, clips=2), total=163.0, cold=False)
    assert [run.steps for run in past_runs(plan, CLIPS)] == [(2.0, 10.0)] * 3


def test_the_last_runs_are_kept_and_damage_is_none(plan: Plan, cache: Path):
    for number in range(KEPT + 2):
        remember(plan, CLIPS, timings([20.0 * number]), total=100.0 + 20 * number, cold=False)
    assert [run.steps for run in past_runs(plan, CLIPS)] == [(float(number),) for number in range(2, KEPT + 2)]
    (file,) = cache.iterdir()
    values = json.loads(file.read_text())
    for damage in ({**values, "shape": {}}, {**values, "runs": [{}]}, {**values, "runs": 3}, [], "\0"):
        file.write_text(json.dumps(damage))
        assert past_runs(plan, CLIPS) == []
    for name, value in (("steps", [1.0, 2.0]), ("clip", float("nan")), ("others", "x")):
        file.write_text(json.dumps({**values, "runs": [{**values["runs"][0], name: value}]}))
        assert past_runs(plan, CLIPS) == []
    file.write_text("{")
    assert expected_time(plan, CLIPS) == UNKNOWN
    remember(plan, CLIPS, timings([40.0]), total=60.0, cold=False)
    assert expected_time(plan, CLIPS).startswith("about 60 s")


def test_without_a_place_nothing_is_kept(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    remember(plan, CLIPS, timings([40.0]), total=60.0, cold=False)
    assert expected_time(plan, CLIPS) == UNKNOWN


def test_the_time_by_the_plan_is_an_estimate(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chips, "CHIPS", (SLOW,))
    expected = estimate_plan(plan).expected_seconds
    assert expected
    low, high = map(format_seconds, expected)
    words = f"{low} to {high} by estimate, not measured on hardware, without"
    assert expected_time(plan, CLIPS).startswith(words)


def test_another_machine_with_such_devices_finds_the_runs(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    """As a pod's next one on the same volume."""
    remember(plan, CLIPS, timings([40.0]), total=60.0, cold=False)
    monkeypatch.setenv("HOSTNAME", "another")
    monkeypatch.setattr("platform.node", lambda: "another")
    assert expected_time(plan, CLIPS).startswith("about 60 s")


def test_the_shapes_of_the_last_runs_are_kept(plan: Plan, cache: Path):
    cache.mkdir(parents=True)
    for number in range(SHAPES + 3):
        (cache / f"{number}.json").touch()
        os.utime(cache / f"{number}.json", (number, number))
    remember(plan, CLIPS, timings([40.0]), total=60.0, cold=False)
    assert len(list(cache.iterdir())) == SHAPES
    assert not (cache / "3.json").exists()
    assert expected_time(plan, CLIPS).startswith("about 60 s")


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.25, "1.2 s"), (12.4, "12 s"), (599, "599 s"), (1200, "20 min"), (18000, "5.0 h")]
)
def test_times_are_in_words(seconds: float, text: str):
    assert format_seconds(seconds) == text
