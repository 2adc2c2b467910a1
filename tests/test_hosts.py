"""Several hosts run one command: they find one another, each reads its slices, one writes, and they end together."""

import json
import os
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from ltx2_cli import hosts, read_spec, resolve
from ltx2_cli.core.journal import Journal
from ltx2_cli.core.progress import Ends, Progress
from ltx2_cli.core.report import Silent
from ltx2_cli.core.run import load, make_latents
from ltx2_cli.core.unfinished import Errand
from ltx2_cli.diffusion.latents import unpack
from ltx2_cli.hosts import Hosts, join
from ltx2_cli.media import unfinished_path
from ltx2_cli.spec import SpecError, StoppedError
from pair import ended, start, start_pair

COMMAND = ("-m", "ltx2_cli", "generate", "--model", "demo", "--prompt", "rain")
TINY = ("--height", "64", "--width", "64", "--num-frames", "9", "--steps", "2", "--sharding", "trillium")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[object, ...], dict[str, object]]]:
    """What jax.distributed is asked for, on hosts of eight devices."""
    asked = []
    monkeypatch.setattr(jax, "device_count", lambda: 8 * asked[-1][0][1])
    monkeypatch.setattr(jax.distributed, "initialize", lambda *values, **named: asked.append((values, named)))
    monkeypatch.setattr(hosts, "TPU_DEVICES", ())
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "TPU_", "JAX_LOCAL"))]:
        monkeypatch.delenv(name)
    return asked


# Who is there


def test_one_host_does_nothing_and_imports_no_jax() -> None:
    code = "import sys; from ltx2_cli.hosts import Hosts, join; print(join() == Hosts(), 'jax' in sys.modules)"
    assert ended(start(Path.cwd(), "-c", code)) == (0, "True False\n", "")


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
def test_who_started_the_processes(
    environment: str, processes: int | None, own_devices: object, started: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting in environment.split():
        monkeypatch.setenv(*setting.split("="))
    join()
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
def test_a_tpu_pod_slice(
    environment: str, processes: int, started: list, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    described = tmp_path / "worker-network-endpoints"
    described.write_text("unknown:unknown:10.0.0.1,unknown:unknown:10.0.0.2")
    monkeypatch.setattr(hosts, "TPU_DEVICES", (str(described),))
    monkeypatch.setattr(hosts, "METADATA", described.as_uri())
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    for setting in environment.split():
        monkeypatch.setenv(*setting.split("="))
    join()
    assert [values[1] for values, _ in started] == [processes] * (processes > 1)


def test_what_is_told_wins(started: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert join(num_processes=1) == Hosts()
    assert started == []
    join("10.0.0.1:8476", 3, 2)
    assert started[0][0] == ("10.0.0.1:8476", 3, 2)
    assert started[0][1]["cluster_detection_method"] == "deactivate"


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (("a:1", None, None), "several hosts are told of in part"),
        ((None, 2, 0), "several hosts are told of in part"),
        (("a", 2, 0), "coordinator_address a is not HOST:PORT"),
        (("a:port", 2, 0), "coordinator_address a:port is not HOST:PORT"),
        (("a:1", 2, 2), "process_id 2 is not one of 2 processes"),
    ],
)
def test_what_cannot_be_meant(told: tuple, sentence: str, started: list) -> None:
    with pytest.raises(SpecError, match=sentence):
        join(*told)
    assert started == []


def test_hosts_that_are_not_alike(started: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 12)
    with pytest.raises(SpecError, match="the 2 processes have 12 devices, but this one has 8"):
        join("10.0.0.1:8476", 2, 0)


def test_what_jax_does_not_find(monkeypatch: pytest.MonkeyPatch, started: list) -> None:
    def nowhere(*values: object, **named: object) -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", nowhere)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(SpecError, match="jax does not find the 2 processes of Open MPI"):
        join()


def test_who_never_comes_is_not_waited_for_longer_than_said(tmp_path: Path) -> None:
    alone = ("--coordinator-address", "localhost:1", "--num-processes", "2", "--process-id", "1")
    began = time.monotonic()
    code, out, err = ended(start(tmp_path, *COMMAND, *alone, "--initialization-timeout", "1"))
    assert (code, out) == (1, "")
    assert err.startswith("error: not all of the 2 processes of the command line met within 1 s\nhint: ")
    assert err.count("\n") == 2
    assert time.monotonic() - began < hosts.GRACE


# One command on two hosts of four devices each


def test_two_hosts_make_the_clip_of_one(tmp_path: Path) -> None:
    """The seed is drawn once; one writes and speaks; the latents are those of one process with eight devices."""
    files = ("-o", "clip.mp4", "--save-latents", "latents")
    (code, out, err), other = map(ended, start_pair(tmp_path, *COMMAND, *TINY, *files))
    assert (code, out) == (0, "clip.mp4\n"), err
    assert other == (0, "", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clip.mp4", "clip.yaml", "latents"]
    record = yaml.safe_load((tmp_path / "clip.yaml").read_text())
    assert f"seed: {record['seed']}\n" in err
    plan = resolve(read_spec(config=tmp_path / "clip.yaml"))
    assert plan.sharding.mesh.size == 8
    alone = unpack(make_latents(plan, load(plan)), plan.latent_shapes)
    together = load_file(tmp_path / "latents")
    for name, wanted in alone._asdict().items():
        assert np.linalg.norm(together[name] - wanted) <= 2e-5 * np.linalg.norm(wanted)


def test_two_hosts_go_on_with_a_run(tmp_path: Path) -> None:
    """One that stopped after a step with eight devices in one process ends in the same latents."""
    files = {"output": str(tmp_path / "clip.mp4"), "save_latents": str(tmp_path / "latents")}
    size = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 2}
    plan = resolve(read_spec(model="demo", prompt="rain", seed=3, sharding="trillium", **size, **files))
    unfinished = unfinished_path(plan.spec)

    def stop(progress: Progress) -> None:
        kept(progress)
        if progress.step == 1:
            raise StoppedError("", "")

    kept = Journal(unfinished, plan, Errand(Ends.clips, None), Silent(), True, 0)
    with pytest.raises(StoppedError):
        make_latents(plan, load(plan), keep=stop)
    alone = unpack(make_latents(plan, load(plan)), plan.latent_shapes)
    (code, out, err), other = map(ended, start_pair(tmp_path, "-m", "ltx2_cli", "resume", str(unfinished)))
    assert (code, out) == (0, f"{tmp_path / 'clip.mp4'}\n"), err
    assert other == (0, "", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clip.mp4", "clip.yaml", "latents"]
    for name, wanted in alone._asdict().items():
        assert np.linalg.norm(load_file(tmp_path / "latents")[name] - wanted) <= 2e-5 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("first", "second", "code", "sentence"),
    [
        ("--seed 3", "--seed 4", 2, "the hosts differ: seed is 3 on host 0 and 4 on host 1"),
        ("-o taken.mp4", "-o taken.mp4", 2, "taken.mp4 exists"),
        ("--noise taken.mp4", "--noise taken.mp4", 2, "the noise file taken.mp4 cannot be read"),  # when it runs
        ("", "--config nowhere.yaml", 2, "host 1: nowhere.yaml cannot be read"),
    ],
)
def test_what_one_refuses_none_does(first: str, second: str, code: int, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "taken.mp4").touch()
    pair = start_pair(tmp_path, *COMMAND, *TINY, first=first.split(), second=second.split())
    (one, out, err), other = map(ended, pair)
    assert (one, out) == (code, "")
    assert err.splitlines()[-2].startswith(f"error: {sentence}")
    assert err.count("error: ") == 1
    assert other == (code, "", "")


@pytest.mark.parametrize(
    ("seed", "sentence"),
    [(None, "several hosts need one seed"), (3, "one of 8 devices on 2 hosts would do all the work")],
)
def test_what_several_hosts_cannot_do(seed: int | None, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(SpecError, match=sentence):
        resolve(read_spec(model="demo", prompt="rain", seed=seed, sharding="single"))


def test_who_is_left_does_not_wait_for_who_is_gone(tmp_path: Path) -> None:
    one, other = start_pair(tmp_path, *COMMAND, *TINY)
    assert one.stderr
    while "does not know rain" not in one.stderr.readline():
        assert one.poll() is None
    other.send_signal(signal.SIGINT)
    code, out, err = ended(other)
    assert (code, out) == (130, "")
    assert err.startswith("error: interrupted\n")
    began = time.monotonic()
    code, out, err = ended(one)
    assert code != 0
    assert time.monotonic() - began < hosts.HEARTBEAT + 10
    assert "another host ended" in err or "another task died" in err  # our words, or jax's where it ends the process
    assert not list(tmp_path.rglob("*.mp4"))


# Each host reads its own slices

WORKER = """
import json, sys
from pathlib import Path
import jax, numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ltx2_cli.hosts import fetch, join
from ltx2_cli.nn.basic import Linear
from ltx2_cli.weights import load as loading, staging
from ltx2_cli.weights.checkpoint import DTYPES, TensorFiles
from ltx2_cli.weights.declare import Scope

_, where, _, address, _, count, _, number = sys.argv
staging.SMALL = 0  # nothing is sent whole to every device
join(address, int(count), int(number))
bytes_read = dict.fromkeys(["rows", "columns", "stack", "replicated"], 0)
mapped = set()

class Counting(TensorFiles):
    def read(self, name, index):
        part = super().read(name, index)  # a map: its pages are read once, however many devices want them
        if (name, str(index)) not in mapped:
            bytes_read[name.split(".")[0]] += part.nbytes
        mapped.add((name, str(index)))
        return part

    def read_into(self, name, first, out):
        super().read_into(name, first, out)
        bytes_read[name.split(".")[0]] += out.nbytes

class Network(nnx.Module):
    def __init__(self):
        scope = Scope("float32")
        self.rows = scope.weight("rows", (64, 32), ("across", None))
        self.columns = scope.weight("columns", (64, 32), (None, "across"))
        self.stack = scope.stacked("stack", 3).weight("kernel", (16, 32), ("across", "within"))
        self.replicated = scope.weight("replicated", (64, 32), (None, None))

mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("across", "within"))  # hosts, devices of a host
spread = lambda axes: PartitionSpec(*(axis if axis in mesh.shape else None for axis in axes))
place = lambda weight: NamedSharding(mesh, spread(weight.axes))
loaded = loading.load(Network(), Counting(Path.cwd()), place, chunk=1 if where == "devices" else None)
same = [np.array_equal(fetch(getattr(loaded, name)[...]), np.load(f"{name}.npy")) for name in bytes_read]
print(json.dumps([all(same), bytes_read]))
"""


@pytest.mark.parametrize("where", ["host", "devices"])
def test_a_host_reads_what_its_devices_hold(where: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows, columns, replicated = random.standard_normal((3, 64, 32), np.float32)
    stack = random.standard_normal((3, 16, 32), np.float32)
    for name, array in {"rows": rows, "columns": columns, "replicated": replicated, "stack": stack}.items():
        np.save(tmp_path / f"{name}.npy", array)
    layers = {f"stack.{i}.kernel": layer for i, layer in enumerate(stack)}
    save_file({"rows": rows, "columns": columns, "replicated": replicated, **layers}, tmp_path / "model.safetensors")
    for code, out, err in map(ended, start_pair(tmp_path, "-c", WORKER, where)):
        assert code == 0, err
        same, read = json.loads(out.splitlines()[-1])
        assert same
        assert (read["rows"], read["columns"], read["stack"]) == (
            rows.nbytes // 2,
            columns.nbytes // 2,
            stack.nbytes // 2,
        )
        assert read["replicated"] == replicated.nbytes // 2  # the other half comes from the other host
