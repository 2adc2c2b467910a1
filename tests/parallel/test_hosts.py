"""Several hosts run one command: they find one another, each reads its slices, one writes, and they end together."""

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import imageio_ffmpeg
import jax
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from ltx2_cli import read_spec, resolve
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import START, open_components, run_phases
from ltx2_cli.diffusion.latents import from_tokens
from ltx2_cli.errors import UsageError
from ltx2_cli.parallel import hosts as distributed
from ltx2_cli.parallel.hosts import ProcessGroup, init_distributed
from pair import ended, ended_commands, start, start_programs, start_readers
from program import run_program

DEMO = ("--model", "demo", "--prompt", "rain")
MESH = ("--sharding", "trillium")
TINY = ("--height", "64", "--width", "64", "--num-frames", "9", *MESH)
DRAFT = ("--recipe", "two_stage", "--draft", "--seed", "3", "--num-frames", "9", "--steps", "1", *MESH)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[object, ...], dict[str, object]]]:
    """What jax.distributed is asked for, on hosts of eight devices."""
    asked = []
    monkeypatch.setattr(jax, "device_count", lambda: 8 * asked[-1][0][1])
    monkeypatch.setattr(jax.distributed, "initialize", lambda *values, **named: asked.append((values, named)))
    monkeypatch.setattr(distributed, "TPU_DEVICES", ())
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "TPU_", "JAX_LOCAL"))]:
        monkeypatch.delenv(name)
    return asked


# Who is there


def test_a_single_host_imports_no_jax() -> None:
    code = "import sys; from ltx2_cli.parallel.hosts import init_distributed"
    code += "; print(init_distributed().count, 'jax' in sys.modules)"
    assert ended(start(Path.cwd(), "-c", code)) == (0, "1 False\n", "")


@pytest.mark.parametrize(
    ("environment", "processes", "own_devices"),
    [
        ("SLURM_JOB_ID=7 SLURM_NTASKS=4", None, None),  # a batch script: the tasks are not started yet
        ("SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=4", None, None),
        ("SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=4", 4, ()),
        ("SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2", 4, None),  # two tasks a node: a device each, as jax has it
        ("SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=4 JAX_LOCAL_DEVICE_IDS=0", 4, None),
        ("OMPI_COMM_WORLD_SIZE=1", None, None),
        ("OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_SIZE=1", 3, ()),
        ("OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_SIZE=3", 3, None),
        ("TPU_WORKER_HOSTNAMES=a,b", None, None),  # without a TPU
    ],
)
def test_launchers_are_detected(
    environment: str, processes: int | None, own_devices: object, started: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting in environment.split():
        monkeypatch.setenv(*setting.split("="))
    init_distributed()
    assert [values for values, _ in started] == [(None, processes, None)] * (processes is not None)
    assert [named["local_device_ids"] for _, named in started] == [own_devices] * (processes is not None)


@pytest.mark.parametrize(
    ("environment", "processes"),
    [
        ("TPU_WORKER_HOSTNAMES=a,b", 2),
        ("TPU_WORKER_HOSTNAMES=localhost", 1),
        ("TPU_WORKER_HOSTNAMES=a,b MEGASCALE_NUM_SLICES=2", 4),
        ("TPU_PROCESS_ADDRESSES=a:1,b:1,c:1 TPU_WORKER_HOSTNAMES=a", 3),
        ("TPU_WORKER_HOSTNAMES=a,b JAX_PLATFORMS=cpu", 1),
        ("JAX_PLATFORMS=tpu,cpu", 2),  # the machine's own description
        ("TPU_SKIP_MDS_QUERY=1", 1),
    ],
)
def test_tpu_pod_slices_are_detected(
    environment: str, processes: int, started: list, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    described = tmp_path / "worker-network-endpoints"
    described.write_text("unknown:unknown:10.0.0.1,unknown:unknown:10.0.0.2")
    monkeypatch.setattr(distributed, "TPU_DEVICES", (str(described),))
    monkeypatch.setattr(distributed, "METADATA", described.as_uri())
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    for setting in environment.split():
        monkeypatch.setenv(*setting.split("="))
    init_distributed()
    assert [values[1] for values, _ in started] == [processes] * (processes > 1)


def test_arguments_override_the_detected_launcher(started: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert init_distributed(num_processes=1) == ProcessGroup()
    assert started == []
    init_distributed("10.0.0.1:8476", 3, 2)
    assert started[0][0] == ("10.0.0.1:8476", 3, 2)
    assert started[0][1]["cluster_detection_method"] == "deactivate"


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (("a:1", None, None), "some are missing"),
        ((None, 2, 0), "some are missing"),
        (("a", 2, 0), "coordinator_address a is not HOST:PORT"),
        (("a:port", 2, 0), "coordinator_address a:port is not HOST:PORT"),
        (("a:1", 2, 2), "process_id 2 is not one of 2 processes"),
    ],
)
def test_wrong_arguments_are_refused(told: tuple, sentence: str, started: list) -> None:
    with pytest.raises(UsageError, match=sentence):
        init_distributed(*told)
    assert started == []


def test_hosts_with_unequal_device_counts_are_refused(started: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 12)
    with pytest.raises(UsageError, match="the 2 processes have 12 devices, but this one has 8"):
        init_distributed("10.0.0.1:8476", 2, 0)


def test_an_incomplete_launcher_environment_is_an_error(monkeypatch: pytest.MonkeyPatch, started: list) -> None:
    def nowhere(*values: object, **named: object) -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", nowhere)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="jax does not find the 2 processes of Open MPI"):
        init_distributed()


def test_missing_hosts_are_an_error_after_the_timeout(tmp_path: Path) -> None:
    alone = ("--coordinator-address", "localhost:1", "--num-processes", "2", "--process-id", "1")
    code, out, err = ended(
        start(tmp_path, "-m", "ltx2_cli", "generate", *DEMO, *alone, "--initialization-timeout", "1")
    )
    assert (code, out) == (1, "")
    assert err.startswith("error: not all of the 2 processes of the command line met within 1 s\nhint: ")
    assert err.count("\n") == 2  # and not what jax says when its own timeout aborts the process


# Commands on two hosts of four devices each


Hosts = tuple[tuple[int, str, str], tuple[int, str, str]]  # exit code, stdout and stderr of each of two


@dataclass(frozen=True)
class Runs:
    """What two hosts did in one folder."""

    folder: Path
    stopped_by_second: Hosts
    stopped_again: Hosts
    finished: Hosts
    stopped_at_end: Hosts


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run that the second host's SIGTERM stops, gone on with until the first host's, gone on with to its end; then
    the same without interruption, as `replay` makes it, and every command that goes on from its files. At last a run
    that the first host's SIGTERM stops, with which the processes end."""
    folder = tmp_path_factory.mktemp("hosts")
    clip = ["generate", *DEMO, *TINY, "--steps", "4", "--seed", "3", "--save-run"]
    commands = [
        ["signal", "SIGTERM", "1", "0", "1"],
        [*clip, "-o", "clip.mp4", "--save-latents", "clip.safetensors"],
        ["signal", "SIGTERM", "0", "0", "3"],
        ["resume", "clip.run"],
        ["resume", "clip.run"],
        ["shared", "own"],
        ["shared", "common"],
        ["replay", "--verify", "clip.mp4", "-o", "again.mp4", "--save-latents", "again.safetensors", *MESH],
        ["decode", "clip.safetensors", "-o", "decoded/", "-o", "decoded.wav", *MESH],
        ["generate", *DEMO, *DRAFT, "--image", str(folder / "picture.png"), "--save-latents", "draft.safetensors"],
        ["upsample", "draft.safetensors", "--latents-only", "--save-latents", "large.safetensors", *MESH],
        ["signal", "SIGTERM", "0", "0", "1"],
        [*clip, "-o", "last.mp4"],
    ]
    Image.linear_gradient("L").convert("RGB").save(folder / "picture.png")
    for host in range(2):
        (folder / f"own{host}").mkdir()
        (folder / f"common{host}").symlink_to(folder)
    first, second = map(ended_commands, start_programs(folder, *commands))
    codes, outs, errs = zip(*(zip(*host[2:-1], strict=True) for host in (first, second)), strict=True)
    finished = tuple(zip(map(max, codes), map("".join, outs), map("".join, errs), strict=True))
    return Runs(folder, (first[0], second[0]), (first[1], second[1]), finished, (first[-1], second[-1]))


def check_stopped(hosts: Hosts, number: int, step: int) -> None:
    """All ended after that step, and the first says so; the one of that number had the signal."""
    assert [(code, out) for code, out, _ in hosts] == [(130, "")] * 2
    assert f"stopped after step {step} of 4 of stage 1\n" in hosts[0][2]
    assert ["stopping after this step" in err for *_, err in hosts] == [number == host for host in range(2)]
    assert "stopped" not in hosts[1][2]


@pytest.mark.slow
def test_sigterm_on_the_first_host_stops_both_after_the_same_step(runs: Runs) -> None:
    """Also where a run is gone on with; and the processes end with it."""
    check_stopped(runs.stopped_again, 0, 3)
    check_stopped(runs.stopped_at_end, 0, 1)
    assert "hint: `ltx2 resume last.run` goes on\n" in runs.stopped_at_end[0][2]
    assert [path.name for path in runs.folder.glob("last*")] == ["last.run"]


@pytest.mark.slow
def test_sigterm_on_the_second_host_stops_both_after_the_same_step(runs: Runs) -> None:
    check_stopped(runs.stopped_by_second, 1, 1)


@pytest.mark.slow
def test_a_run_stopped_on_two_hosts_resumes_to_the_same_bytes(runs: Runs) -> None:
    (code, _, err), other = runs.finished
    assert code == 0, err
    assert other == (0, "", "")
    assert not list(runs.folder.glob("clip*.run"))
    assert streams(runs.folder / "clip.mp4") == streams(runs.folder / "again.mp4")
    resumed, whole = (load_file(runs.folder / f"{name}.safetensors") for name in ("clip", "again"))
    assert {name: array.tobytes() for name, array in resumed.items()} == {
        name: array.tobytes() for name, array in whole.items()
    }


def streams(clip: Path) -> str:
    """The hashes of its encoded picture and sound; the records differ by the files' names."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", clip, "-c", "copy", "-f", "streamhash", "-"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_only_the_first_host_writes_and_prints(runs: Runs) -> None:
    _, out, _ = runs.finished[0]
    paths = [line for line in out.splitlines() if "identical" not in line and line != "shared"]
    assert [Path(path).name for path in paths] == [
        "clip.mp4",
        "again.mp4",
        "decoded",
        "decoded.wav",
        "draft.safetensors",
        "draft.png",
        "large.safetensors",
    ]


@pytest.mark.slow
def test_shared_folders_are_distinguished_from_local_ones(runs: Runs) -> None:
    assert runs.finished[0][1].splitlines().count("shared") == 1


@pytest.mark.slow
def test_two_hosts_generate_the_same_clip_as_one(runs: Runs) -> None:
    """Sums over devices differ in their last bits by how these are connected."""
    plan = resolve(read_spec(config=runs.folder / "clip.yaml"))
    assert plan.sharding.mesh.size == 8
    *_, state = run_phases(plan, START, open_components(plan), Report())
    alone = from_tokens(state.latents, plan.latent_shapes)
    for name, wanted in alone._asdict().items():
        assert_near(load_file(runs.folder / "clip.safetensors")[name], wanted)


def assert_near(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.linalg.norm(found - wanted) <= 2e-5 * np.linalg.norm(wanted)


@pytest.mark.slow
def test_two_hosts_replay_the_clip_identically(runs: Runs) -> None:
    assert "identical" in runs.finished[0][1]


@pytest.mark.slow
def test_two_hosts_decode_the_same_frames_as_one(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    latents = str(runs.folder / "clip.safetensors")
    assert run_program(monkeypatch, "decode", latents, "-o", f"{tmp_path}/frames/", *MESH) == 0
    frames = sorted((tmp_path / "frames").iterdir())
    assert len(frames) == 9
    for frame in frames:
        assert frame.read_bytes() == (runs.folder / "decoded" / frame.name).read_bytes()
    assert (runs.folder / "decoded.wav").stat().st_size > 9000


@pytest.mark.slow
def test_two_hosts_upsample_to_the_same_latents_as_one(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, large = str(runs.folder / "draft.safetensors"), tmp_path / "large.safetensors"
    assert run_program(monkeypatch, "upsample", draft, "--latents-only", "--save-latents", str(large), *MESH) == 0
    for name, wanted in load_file(large).items():
        assert_near(load_file(runs.folder / "large.safetensors")[name], wanted)


def test_an_error_on_one_host_ends_all(tmp_path: Path) -> None:
    pair = start_programs(tmp_path, ["only", "1", "--config", "nowhere.yaml"], ["generate", *DEMO, *TINY])
    (code, out, err), other = map(ended, pair)
    assert (code, out) == (2, "")
    assert err.startswith("error: host 1: nowhere.yaml cannot be read")
    assert err.count("error: ") == 1
    assert other == (2, "", "")


@pytest.mark.parametrize(
    ("seed", "sentence"),
    [(None, "several hosts need one seed"), (3, "one of 8 devices on 2 hosts would do all the work")],
)
def test_requests_that_need_a_single_host_are_refused(
    seed: int | None, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UsageError, match=sentence):
        resolve(read_spec(model="demo", prompt="rain", seed=seed, sharding="single"))


def test_interrupting_one_host_ends_both(tmp_path: Path) -> None:
    """Where a run is not kept. The other host is not told by a broken connection, but by the one that ends."""
    one, other = start_programs(tmp_path, ["generate", *DEMO, *TINY])
    while not one.err.exists() or "the model was trained at" not in one.err.read_text():
        assert one.poll() is None
        time.sleep(0.01)
    other.send_signal(signal.SIGINT)
    for code, out, err in map(ended, (other, one)):
        assert (code, out) == (130, "")
        assert "interrupted\n" in err
    assert not list(tmp_path.rglob("*.mp4"))


# Each host reads its own slices


def test_each_host_reads_only_the_slices_of_its_devices(tmp_path: Path) -> None:
    """Laid out on the host, and on the devices."""
    random = np.random.default_rng(0)
    rows, columns, replicated = random.standard_normal((3, 64, 32), np.float32)
    stack = random.standard_normal((3, 16, 32), np.float32)
    arrays = {"rows": rows, "columns": columns, "stack": stack, "replicated": replicated}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    layers = {f"stack.{i}.kernel": layer for i, layer in enumerate(stack)}
    save_file({"rows": rows, "columns": columns, "replicated": replicated, **layers}, tmp_path / "model.safetensors")
    for code, out, err in map(ended, start_readers(tmp_path)):
        assert code == 0, err
        said = [json.loads(found) for found in re.findall(r"\[(?:true|false), {.*?}]", out)]  # Gloo prints there too
        halves = {name: array.nbytes // 2 for name, array in arrays.items()}  # the rest of what is whole is sent
        assert said == [[True, halves]] * 2
