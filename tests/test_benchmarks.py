"""The measurements that need a machine nobody has at hand run here at a small size."""

import math
import re
from pathlib import Path

import pytest

import benchmarks.__main__ as comparisons
from benchmarks import accuracy, plans
from benchmarks.gpu_step import lines
from compilers import needs_libtpu
from ltx2_cli.core.run import programs
from ltx2_cli.estimate.estimate import estimate_plan
from ltx2_cli.plan.step_cost import BY_DIFFUSION, IN_EIGHT_BITS, OVER_LEAST, WAITED_FOR


def test_rows_of_slices_are_written_behind_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of 4 M cycles, whose arithmetic takes 2 M, beside one of MaxDiffusion's."""
    results, rows = tmp_path / "results.md", tmp_path / "plans.json"
    monkeypatch.setattr(plans, "RESULTS", results)
    monkeypatch.setattr(plans, "ROWS", rows)
    results.write_text(f"measured\n\n{plans.BEGIN}\nold rows\n")
    row = {
        "commit": "abc",
        "load": 2.04,
        "mesh": {"passes": 2, "tokens": 1},
        "floor": 2e6,
        "cycles": {"by_scope": {"text": 3e6, "exchange": 1e6}, "by_xla": 153.3e6},
        "memory": {"peak_bytes": 19e9, "temporaries_bytes": 3e8},
        "sent_bytes": 5e9,
        "sent_seconds": 0.05,
        "waiting_seconds": 0.004,
        "compile_seconds": 88.0,
    }
    monkeypatch.setattr(plans, "measure", lambda name: row)
    monkeypatch.setattr(plans, "version", lambda: "abc")
    plans.main(["v6e:2x4", "ltx2", "768x512"])
    monkeypatch.setattr(plans, "measure", None)
    plans.main(["v6e:2x4", "ltx2", "768x512"])  # it is up to date
    text = results.read_text()
    assert text.startswith("measured\n\n")
    assert [text.splitlines()[-1]] == [line for line in text.splitlines() if line.startswith("| ltx2")]
    assert text.splitlines()[-1] == (
        "| ltx2 768x512 v6e:2x4 | 2 | passes 2 | 2.0 | 4.0 | 2.00 | 153.3 | 0.50 | 19.00 | 0.30 | 5.00 | 50 | 4 | 88"
        " | 2.0 | abc |"
    )


def test_expected_times_have_the_ratios_of_the_rows() -> None:
    """The smallest and the largest ratio of a row's schedule to its least, by phase."""
    rows, ratios = plans.read_rows(), dict[str, list[float]]()
    for name, row in rows.items():
        if "floor" in row:
            phase = "in eight bits" if name in plans.EIGHT_BITS else "denoise"
            ratios.setdefault(phase, []).append(sum(row["cycles"]["by_scope"].values()) / row["floor"])
            continue
        seconds, least = {}, row["least_seconds"]
        for network, program in row["programs"].items():
            seconds[network] = sum(program["cycles"]["by_scope"].values()) / program["cycles"]["hertz"]
        if plans.TILES in name:
            ratios.setdefault("by diffusion", []).append(sum(seconds.values()) / sum(least.values()))
            continue
        for network, phase in plans.PHASES.items():
            ratios.setdefault(phase, []).append(seconds[network] / least[network])
        decoding = seconds["frames"] + seconds["audio"]
        ratios.setdefault("decode", []).append(decoding / (least["frames"] + least["audio"]))
    stated = {**OVER_LEAST, "by diffusion": BY_DIFFUSION, "in eight bits": IN_EIGHT_BITS}
    assert ratios.keys() == stated.keys()
    for phase, found in ratios.items():
        assert (min(found), max(found)) == pytest.approx(tuple(stated[phase]), rel=0.1), phase


def test_arithmetic_waits_for_the_stated_share_of_what_is_sent() -> None:
    rows = plans.read_rows().values()
    shares = [row["waiting_seconds"] / row["sent_seconds"] for row in rows if row.get("waiting_seconds") is not None]
    assert min(shares) == pytest.approx(WAITED_FOR, rel=0.25)
    assert max(shares) <= 1


def test_rows_of_networks_are_a_table_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 4 M cycles, twice the least."""
    results, rows = tmp_path / "results.md", tmp_path / "plans.json"
    monkeypatch.setattr(plans, "RESULTS", results)
    monkeypatch.setattr(plans, "ROWS", rows)
    results.write_text("measured\n")
    program = {
        "cycles": {"by_scope": {"text": 3e6, "exchange": 1e6}, "by_xla": 5e6, "hertz": 2e9},
        "memory": {"peak_bytes": 19e9, "temporaries_bytes": 3e8},
        "compile_seconds": 88.0,
    }
    least = dict.fromkeys(plans.PROGRAMS, 1e-3)
    row = {"commit": "abc", "load": 2.04, "programs": dict.fromkeys(least, program), "least_seconds": least}
    monkeypatch.setattr(plans, "measure", lambda name: row)
    plans.main(["networks", "ltx2.3", "v6e:2x4"])
    *_, frames, sound = results.read_text().splitlines()
    assert frames == "| ltx2.3 v6e:2x4 | frames | 2.0 | 4.0 | 2.0 | 5.0 | 2 | 19.00 | 0.30 | 88 | 2.0 | abc |"
    assert sound == "| ltx2.3 v6e:2x4 | audio | 2.0 | 4.0 | 2.0 | 5.0 | 2 | 19.00 | 0.30 | 88 | 2.0 | abc |"


@needs_libtpu
@pytest.mark.parametrize("name", ["ltx2 768x512 v6e:2x4", "ltx2.3 networks v6e:2x4"])
def test_a_row_is_planned_as_a_run_would_be(name: str) -> None:
    plan = plans.plan_of(name)
    assert len(plan.stages[0].passes) == (2 if "768x512" in name else 4)
    assert len(plan.stages) == (1 if "768x512" in name else 2)
    if "networks" in name:
        assert {program.name for program in programs(plan)} >= {*plans.PROGRAMS}
        sizes = [f"{32 * stage.geometry.width}x{32 * stage.geometry.height}" for stage in plan.stages]
        assert " and ".join(sizes) in plans.NETWORKS_HEADER
        least = plans.least_seconds(plan, estimate_plan(plan).phase_seconds)
        assert 1 < least["frames"] / least["audio"] < 100  # of 5 s of a clip in eight parts, and of the whole sound


def test_networks_are_measured_beside_diffusers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At small widths: one forward of the denoiser, and one clip decoded."""
    heads = {"num_attention_heads": 2, "attention_head_dim": 16, "cross_attention_dim": 32, "caption_channels": 32}
    audio = {"audio_num_attention_heads": 2, "audio_attention_head_dim": 8, "audio_cross_attention_dim": 16}
    monkeypatch.setattr(comparisons, "TRANSFORMER", {**comparisons.TRANSFORMER, **heads, **audio})
    widths = {"block_out_channels": (8, 8, 8, 8), "decoder_block_out_channels": (8, 16, 32)}
    monkeypatch.setattr(comparisons, "VAE", {**comparisons.VAE, **widths})
    monkeypatch.setattr(comparisons, "ROUNDS", 1)
    for measure in (comparisons.denoiser_step, comparisons.video_decode):
        row = measure(tmp_path)
        assert min(*row.ours, *row.theirs) > 0
        assert re.fullmatch(r"\| .*, diffusers (\| [0-9.]+ ){2}\| .* \(.* to .*\) \|", str(row))


@pytest.mark.slow
def test_the_gpu_benchmark_runs_with_the_embedded_model_anywhere() -> None:
    rows = [line.strip("| ").split(" | ") for line in [*lines(tiny=True, room=math.inf)][4:]]
    assert [int(passes) for passes, *_ in rows] == [2, 1]
    for _, ours, share, theirs, ratio in rows:
        assert min(float(ours), float(theirs)) > 0
        assert share.endswith("%")
        assert float(ratio) == pytest.approx(float(ours) / float(theirs), rel=0.05, abs=0.01)


def test_accuracy_is_that_of_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clips of two steps, of which the last in eight bits beside the same in bfloat16."""
    monkeypatch.setattr(accuracy, "CLIPS", 2)
    half = {"dtype": "bfloat16", "text_encoder_dtype": "bfloat16"}
    ways = (half, {**half, "weights": "int8", "compute": "full"})
    (other, whole), (_, rounded) = (accuracy.clips(num_inference_steps=2, num_frames=9, **way) for way in ways)
    assert accuracy.row("int8 | full", [], [(rounded, whole)]).count("|") == 6
    assert 0 < accuracy.error(rounded.latents.video, whole.latents.video) < 0.2
    assert accuracy.error(other.latents.video, whole.latents.video) > 0.5


def test_every_narrow_type_has_its_accuracy() -> None:
    """And the figures are those of the script's own columns: a row with fewer would be of an earlier one."""
    lines = accuracy.RESULTS.read_text().splitlines()
    assert accuracy.HEADER.splitlines() == lines[: len(accuracy.HEADER.splitlines())]
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith(("| int8", "| fp8", "| int4"))]
    assert [" | ".join(row[:2]) for row in rows] == list(accuracy.WAYS)
    assert {len(row) for row in rows} == {7}
