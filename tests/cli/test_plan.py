"""`ltx2 plan`: what it prints and emits, what it refuses, and when it ends with which code."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh

from compilers import needs_cuda, needs_libtpu
from ltx2_cli import chips
from ltx2_cli.chips import Chip
from ltx2_cli.estimate import offline
from ltx2_cli.estimate.collectives import collectives, sent_bytes
from ltx2_cli.estimate.compiled import Compiled, CompileFailure, Memory
from ltx2_cli.estimate.cycles import LAYERS, OUTSIDE, SCHEDULE, SCOPES, XLA, Cycles
from ltx2_cli.estimate.estimate import estimate_plan
from ltx2_cli.estimate.offline import MeshSearch, topology
from ltx2_cli.plan.resolve import plan_offline
from ltx2_cli.plan.step_cost import Rows, TokenCounts, denoiser_flops
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.runs.plan_page import estimate_lines, search_lines
from program import CACHE, cache_restored, run_program
from tools.train_demo.arch import ARCH

MESH = """
mesh: {passes: 2, heads: -1}
weights: {heads: heads, mlp: heads}
activations: {rows: passes, heads: heads}
replicate_vae: true
use_batched_text_encoder: true
"""
CHIP = Chip("tiny", ("cpu",), hbm_bytes=160e6, flops=1e12, hbm_bandwidth=1e12, link_bandwidth=1e12)
# As on a machine without the compilers, installed here or not.
WITHOUT_COMPILERS = """
import os, sys
sys.modules["libtpu"] = sys.modules["jax_plugins"] = None
os.environ.pop("TPU_LIBRARY_PATH", None)
from ltx2_cli.cli.app import main
main()
"""
GPU_CLIP = (  # compiles soonest
    *("--dtype", "bfloat16", "--height", "64", "--width", "64", "--num-frames", "9"),
    *("--guidance-scale", "1", "--audio-guidance-scale", "1", "--stg-scale", "0", "--audio-stg-scale", "0"),
)
Run = Callable[..., tuple[int, str, str]]


def flops(tokens: TokenCounts, rows: int, contexts: int, videos: float = 1) -> float:
    """Of the embedded model, of rows that share nothing."""
    in_layers = rows * ARCH.transformer.num_layers
    return denoiser_flops(ARCH.transformer, tokens, Rows(videos, rows, in_layers, in_layers, contexts))


class Planned(NamedTuple):
    """What one command gave."""

    code: int
    said: dict[str, Any]
    hlo: dict[str, str]  # by the name of its file


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """The JSON and the HLO of one run on eight devices: two of the four passes beside each other, a head on each."""
    folder, out = tmp_path_factory.mktemp("planned"), StringIO()
    profile = folder / "mesh.yaml"
    profile.write_text(MESH)
    arguments = ["--model", "demo", "--sharding", str(profile), "--dump-hlo", str(folder / "a" / "hlo"), "--json"]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        code = run_program(patch, "plan", *arguments)
    hlo = {path.name: path.read_text() for path in (folder / "a" / "hlo").iterdir()}
    return Planned(code, json.loads(out.getvalue()), hlo)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`ltx2 plan` of the embedded model, with an empty cache: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("mesh.yaml").write_text(MESH)
    return lambda *arguments: (
        run_program(monkeypatch, "plan", "--model", "demo", *arguments),
        *capsys.readouterr(),
    )


def test_json_has_the_figures_of_a_device_and_a_forward(planned: Planned) -> None:
    said = planned.said
    assert planned.code == 0
    memory = said["memory"]
    assert memory["arguments_bytes"] >= said["weight_bytes"]["transformer"]
    assert memory["peak_bytes"] >= memory["arguments_bytes"] + memory["temporaries_bytes"] > 0
    assert said["compile_seconds"] > 0
    assert said["flops"] == flops(TokenCounts(112, 51, 32), rows=2, contexts=2, videos=0.5) / 4
    assert said["seconds_per_step"] is None  # nothing is published of a CPU's rates
    assert said["fits"] is True
    assert said["tokens"] == {"video": 112, "audio": 51, "text": 32}
    assert said["sharding"]["mesh"] == {"passes": 2, "heads": 4}


def test_the_dumped_program_is_the_estimated_one(planned: Planned) -> None:
    assert list(planned.hlo) == ["forward.hlo"]
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("passes", "heads"))
    found = collectives(planned.hlo["forward.hlo"], mesh)
    said = planned.said["collectives"]
    assert planned.said["sent_bytes"] == sent_bytes(found) == sum(each["sent_bytes"] for each in said) > 0
    assert [(each["kind"], each["axes"], each["bytes"], each["times"]) for each in said] == [
        (each.kind, list(each.axes), each.bytes, each.times) for each in found
    ]
    assert {each["times"] for each in said} >= {ARCH.transformer.num_layers}


def test_a_plan_leaves_no_files(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "CHIPS", (replace(CHIP, hbm_bytes=1e6),))
    assert plan()[0] == 3
    assert [path.name for path in Path.cwd().iterdir()] == ["mesh.yaml"]


def test_a_plan_is_printed_as_a_table(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "CHIPS", (CHIP,))
    code, out, err = plan("--sharding", "./mesh.yaml", "--stg-scale", "0", "--audio-stg-scale", "0")
    assert code == 0
    assert err == ""
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "model demo, embedded" in rows
    assert "tokens 112 of video, 51 of audio, 32 of text" in rows
    assert "denoise 20 steps, passes: cond, uncond, isolated" in rows
    assert "devices 8 cpu, profile ./mesh.yaml: passes 2 x heads 4" in rows
    assert any(row.startswith("note 3 rows do not divide by the 2 of mesh axis `passes`") for row in rows)
    assert "memory of a device, of 0.2 GB" in rows
    assert any(row.startswith("all-reduce") and "along heads" in row for row in rows)
    (sends,) = (row for row in rows if row.startswith("sends"))
    sent = re.fullmatch(r"sends (\S+ \S+) ([\d.]+) ms \1 not overlapped", sends)  # a CPU's collectives are synchronous
    assert sent
    assert float(sent[2]) > 0
    step, least = (row for row in rows if row.startswith("step "))
    assert re.fullmatch(r"step [\d.]+( ms)? to [\d.]+ ms", step)
    assert "expected time, not measured on hardware" in rows
    assert re.fullmatch(r"step [\d.]+ ms compute .* ms, communication .* ms", least)
    assert "if a device does 1 TFLOP/s, reads 1000 GB/s and sends 1000 GB/s to the others, as its maker says" in rows


def test_two_stages_have_two_forwards(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first at half the size with all passes; the second with one."""
    monkeypatch.setattr(chips, "CHIPS", (replace(CHIP, hbm_bytes=1e9),))
    code, out, _ = plan("--recipe", "two_stage", "--sharding", "single", "--dump-hlo", "hlo", "--json")
    assert code == 0
    assert sorted(path.name for path in Path("hlo").iterdir()) == ["forward.hlo", "forward_2.hlo"]
    said = json.loads(out)
    first, second = said["stages"]
    assert [(each["width"], each["tokens"]["video"], len(each["passes"])) for each in said["stages"]] == [
        (128, 112, 4),
        (256, 448, 1),
    ]
    assert second["flops"] == flops(TokenCounts(448, 51, 32), rows=1, contexts=1)
    assert said["memory"] == first["memory"] != second["memory"]
    assert said["seconds_per_clip"] > 20 * first["seconds_per_step"] + 3 * second["seconds_per_step"]
    assert said["warnings"] == []


@pytest.mark.parametrize(("sampler", "word", "other"), [("euler", "step", "forward"), ("res_2s", "forward", "step")])
def test_times_are_of_forwards_where_a_step_has_several(
    monkeypatch: pytest.MonkeyPatch, sampler: str, word: str, other: str
) -> None:
    monkeypatch.setattr(chips, "CHIPS", (CHIP,))
    made = plan_offline(read_spec(prompt="rain", model="demo", sampler=sampler), jax.devices()[:1])
    rows = [line.split() for line in estimate_lines(estimate_plan(made))]
    timed = [row[0] for row in rows if "compute" in row and "memory" in row and "ms" in row]
    assert word in timed
    assert other not in timed


def test_the_table_has_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """One mesh for both, whose weights are the same: that of the second's single row; the text is laid out for four."""
    monkeypatch.setattr(chips, "CHIPS", (CHIP,))
    two = plan_offline(read_spec(prompt="rain", model="demo", recipe="two_stage", sharding="gpu"), jax.devices())
    rows = [" ".join(line.split()) for line in estimate_lines(estimate_plan(two))]
    begin = rows.index("upsample embedded, its own upsampler")
    assert rows[begin + 1 : begin + 3] == [
        "tokens 448 of video, 51 of audio, 32 of text",
        "denoise 3 steps, passes: cond; devices tokens 8",
    ]
    assert [row for row in rows if row.startswith("one forward")] == [
        f"one forward of a device, stage {number}" for number in (1, 2)
    ]
    assert [row[:13] for row in rows if row.startswith("step")] == ["step, stage 1", "step, stage 2"] * 2


def test_a_plan_that_does_not_fit_exits_with_3_and_an_alternative(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "CHIPS", (replace(CHIP, hbm_bytes=130e6),))
    code, out, err = plan("--sharding", "single", "--set", "keep_resident=true", "--json")
    assert code == 3
    assert json.loads(out)["fits"] is False
    assert "error: this does not fit: to decode takes about 0.1 GB of a device, " in err
    assert err.endswith("hint: ltx2 plan --model demo --sharding single --json --set keep_resident=false\n")


def test_search_compares_meshes_and_plans_the_best(plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "COMPILED", 1)
    code, out, _ = plan("--sharding", "./mesh.yaml", "--search", "--json")
    assert code == 0
    said = json.loads(out)
    (chosen,) = (each for each in said["search"] if each["chosen"])
    assert chosen["mesh"] == said["sharding"]["mesh"] == {"passes": 4, "heads": 2}
    assert chosen["sent_bytes"] == said["sent_bytes"]
    assert {"passes": 2, "heads": 4} in [each["mesh"] for each in said["search"]]
    assert said["search_seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--sharding", "./mesh.yaml", "--set", "sharding.mesh.passes=3"),
            "passes 3 x heads -1 does not fit 8 devices\nhint: nearest: --set sharding.mesh.passes=2; or another",
        ),
        (
            ("--sharding", "./mesh.yaml", "--set", "sharding.mesh.passes=0"),
            "passes 0 x heads -1 does not fit 8",
        ),
        (("--sharding", "./mesh.yaml", "--set", "sharding.mesh.passes=-1"), "passes -1 x heads -1 does not fit 8"),
        (("--sharding", "./mesh.yaml", "--set", "sharding.mesh.heads=-8"), "passes 2 x heads -8 does not fit 8"),
        (("--sharding", "./mesh.yaml", "--set", "sharding.weights.heads=sideways"), "its mesh has no axis `sideways`"),
        (
            ("--sharding", "./mesh.yaml", "--set", "sharding.mesh.haeds=4"),
            "no rule names mesh axis `haeds`; closest: `heads`",
        ),
        (
            ("--sharding", "trillium", "--set", "sharding.mesh.heads=8"),
            "hint: nearest: --set sharding.mesh.heads=4; or",
        ),
        (
            ("--sharding", "./streams.yaml"),
            "tokens and audio_tokens of activations lie along different mesh axes\nhint: one axis for both, or no",
        ),
        (("--dump-hlo", "/proc/nowhere"), "cannot write into /proc/nowhere: No such file"),
        (("--sharding", "./keys.yaml"), "unknown key `sharding.mash`"),
        (("--sharding", "ironwod"), "unknown sharding profile `ironwod`; closest: `ironwood`"),
        (("--topology", ""), " is no TPU slice and no GPU"),
        (("--set", "model=ltx3"), "unknown model `ltx3`; closest: `ltx2"),
        (("--set", "model=someone/model"), "someone/model is not on this machine"),
        (("--height", "100"), "height 100 is not a multiple of 32; nearest: --height 96 or 128"),
    ],
)
def test_wrong_input_is_an_error_with_exit_code_2(plan: Run, arguments: tuple[str, ...], sentence: str) -> None:
    Path("keys.yaml").write_text(MESH + "mash: {}\n")
    Path("streams.yaml").write_text("mesh: {t: 4, a: 2}\nactivations: {tokens: t, audio_tokens: a}\n")
    code, out, err = plan(*arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert "hint: " in err or "nearest: " in err


@pytest.mark.parametrize(
    ("name", "compiler", "command"),
    [
        ("v6e:2x4", "libtpu", "in a clone of ltx2: pip install -c constraints.txt '.[tpu]'"),
        ("h100:8", "the GPUs' compiler", "in a clone of ltx2: make compilers"),
    ],
)
def test_a_missing_compiler_is_an_error_with_the_command_to_install_it(name: str, compiler: str, command: str) -> None:
    arguments = [sys.executable, "-c", WITHOUT_COMPILERS, "plan", "--topology", name]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"compiling for {name} needs {compiler}" in done.stderr
    assert f"hint: on Linux for x86-64, {command}" in done.stderr


@needs_libtpu
def test_an_unknown_slice_is_refused_with_the_known_ones(plan: Run) -> None:
    topology("v6e:2x2")  # libtpu reads its flags once: in this process it writes no schedules
    code, out, err = plan("--topology", "v6e:3x5")
    assert (code, out) == (2, "")
    assert "error: libtpu knows no TPU slice v6e:3x5" in err
    assert "v6e:2x2, v6e:2x4" in err


@pytest.mark.slow
@needs_libtpu
def test_absent_slices_are_planned(plan: Run) -> None:
    topology("v6e:2x2")
    small = ("--height", "64", "--width", "64", "--num-frames", "9")  # compiles sooner
    code, out, _ = plan("--topology", "v6e:2x2", "--json", *small)
    assert code == 0
    said = json.loads(out)
    assert (said["device"], said["devices"]) == ("TPU v6 lite", 4)
    assert said["seconds_per_step"] == max(said["roofline_seconds"].values()) > 0
    assert said["seconds_per_clip"] == pytest.approx(sum(said["phase_seconds"].values()))
    cycles = said["cycles"]
    assert cycles["clock"] == XLA
    assert sum(cycles["by_scope"].values()) == pytest.approx(cycles["by_xla"])
    assert cycles["by_scope"].keys() == {*SCOPES.values(), LAYERS, OUTSIDE}
    sending = sum(each["seconds"] for each in said["collectives"])
    assert said["sent_seconds"] == said["roofline_seconds"]["communication"] == pytest.approx(sending)
    assert said["expected_seconds_per_step"] == pytest.approx([cycles["by_xla"] / cycles["hertz"] + sending] * 2)


@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize(
    ("name", "kind", "count", "gigabytes"), [("h100:8", "NVIDIA H100", 8, 72), ("RTX-4090", "RTX 4090", 1, 21.6)]
)
def test_absent_gpus_are_planned(plan: Run, name: str, kind: str, count: int, gigabytes: float) -> None:
    """Memory by the compiler, with cuDNN's attention and cuBLAS's products, which need no tiles to be chosen unseen; of
    the time the least alone."""
    code, out, _ = plan("--topology", name, "--dump-hlo", "hlo", "--json", *GPU_CLIP)
    assert code == 0
    said = json.loads(out)
    assert said["device"].endswith(kind)
    assert (said["devices"], said["hbm_bytes"]) == (count, gigabytes * 1e9)
    assert said["memory"]["peak_bytes"] > said["memory"]["arguments_bytes"] > 0
    hlo = Path("hlo/forward.hlo").read_text()
    assert "__cudnn$fmhaSoftmax" in hlo
    assert "__cublas$lt$matmul" in hlo
    assert "__triton_nested_gemm" not in hlo
    assert said["seconds_per_step"] == max(said["roofline_seconds"].values()) > 0
    assert (said["expected_seconds_per_step"], said["expected_seconds_per_clip"], said["cycles"]) == (None, None, None)
    assert "no GPU has been measured" in said["roofline_alone"]
    assert (said["sent_bytes"] > 0) == (count > 1)


@pytest.mark.slow
@needs_cuda
def test_layers_on_the_host_of_an_absent_gpu_are_planned(plan: Run) -> None:
    """They take no memory of it, by the compiler; also where jax keeps compiled programs, as it does for users."""
    arguments = {}
    for offload in ("feed_forward", "layers"):
        with cache_restored():
            jax.config.update(CACHE, True)
            reset_cache()
            code, out, _ = plan("--topology", "rtx4080", "--offload", offload, "--json", *GPU_CLIP)
            assert getattr(jax.config, CACHE)
        assert code == 0
        said = json.loads(out)
        weights = said["weight_bytes"]["transformer"]
        arguments[offload] = said["memory"]["arguments_bytes"]
        assert weights < arguments[offload] < 1.2 * weights
    assert arguments["layers"] < 0.5 * arguments["feed_forward"]


@needs_cuda
def test_of_a_gpu_the_least_time_is_printed_alone() -> None:
    plan = plan_offline(read_spec(prompt="rain", model="ltx2"), topology("h100"))
    estimate = estimate_plan(plan)
    page = "\n".join([*search_lines(MeshSearch([estimate], estimate, 1.0)), *estimate_lines(estimate)])
    assert "least time: the roofline, below which no run is; no GPU has been measured" in page
    assert "expected" not in page


@needs_cuda
def test_a_plan_that_does_not_fit_a_gpu_names_more_of_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of them split the weights: in a mesh that the profile would not take by itself."""
    code = run_program(monkeypatch, "plan", "--model", "ltx2.3", "--weights", "bfloat16", "--topology", "rtx4090")
    assert code == 3
    said = capsys.readouterr().err
    assert "a NVIDIA GeForce RTX 4090 has 21.6 GB of its 24.0 GB without 10% kept for cuDNN" in said
    words = "ltx2 plan --model ltx2.3 --weights bfloat16 --topology rtx4090:2 --set sharding.mesh.heads=2"
    assert f"or more chips: {words}\n" in said


def test_cycles_are_printed_by_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds of a million cycles in all, where a chip at its rate takes one."""
    plan = plan_offline(read_spec(prompt="rain", model="ltx2", sharding="single"), jax.devices())
    monkeypatch.setattr(chips, "CHIPS", (replace(CHIP, flops=estimate_plan(plan).stages[0].flops),))
    cycles = Cycles(
        SCHEDULE, {"text": 5e5, "exchange": 1.5e6}, 4e5, 2e5, 5e5, "fusion.1, nn/layers.py:41", 1e5, 3e6, 1e6
    )
    forward = Compiled("forward", "transformer", 0, 1.0, Memory(1, 1, 2), 1, (), "", cycles)
    programs = [forward, replace(forward, name="frames", network="vae")]
    rows = [" ".join(line.split()) for line in estimate_lines(estimate_plan(plan, programs))]
    assert rows[-9:] == [
        "step 2.0 s 2 M cycles, 2.00 times its work at the chip's rate",
        "exchange 1.5 s 1.5 M cycles",
        "text 500 ms 0.5 M cycles",
        "dearest but for products: fusion.1, nn/layers.py:41, 0.1 M cycles",
        "without collectives, parallel copies and stalls; 0.4 M are Pallas kernels, their scalar arguments ones",
        "if |q|·|k| of each head stays below a bound; where it does not, finding the largest score takes 0.2 M more",
        "",
        "the other programs, by the same clock",
        "frames 2.0 s 2 M cycles, 4.0 times their products",
    ]


def test_uncompilable_programs_are_still_estimated() -> None:
    plan = plan_offline(read_spec(prompt="rain", model="ltx2", sharding="single"), jax.devices())
    failure = CompileFailure("forward", "transformer", 0, "UNIMPLEMENTED: no such thing", None)
    rows = [" ".join(line.split()) for line in estimate_lines(estimate_plan(plan, [failure]))]
    assert "not compiled UNIMPLEMENTED: no such thing" in rows
    assert "tokens 6144 of video, 126 of audio, 1024 of text" in rows
    (denoise,) = (row for row in rows if row.startswith("denoise") and "weights" in row)
    assert denoise.startswith("denoise 45.6 GB weights 37.8 GB, beside them about 7.8 GB")
    assert any(row.startswith("decode ") and "weights 1.3 GB, beside them about" in row for row in rows)
