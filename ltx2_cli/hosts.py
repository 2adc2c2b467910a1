"""Several hosts that run one program, a process each: how they find one another, and what they tell one another."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from glob import glob
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from ltx2_cli.platforms import TPU_DEVICES, skip_absent_tpu
from ltx2_cli.spec import RunError, SpecError

if TYPE_CHECKING:  # importing jax takes long, and to find that there is one host needs none
    import jax
    from jax.sharding import Sharding

BY_HAND = "--coordinator-address HOST:PORT --num-processes N --process-id I on each host, I from 0 to N - 1"
ALONE = "--num-processes 1 runs alone"
HEARTBEAT = 30  # seconds of silence after which a host counts as dead, and all the others end
POLL = 0.2  # seconds between two questions whether another host is interrupted
LAST_WORDS = 2.0  # seconds that the first waits until all know
INTERRUPTED = "ltx2/interrupted"  # in the coordination service
GRACE = 10  # seconds that jax, which aborts the process, waits longer than we do
METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/worker-network-endpoints"


@dataclass(frozen=True)
class Hosts:
    """This process, by its number among those that run the same command."""

    number: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether it is the one that writes and speaks."""
        return self.number == 0

    def gather(self, text: str) -> list[str]:
        """What every process says, in their order. Each waits for the last; raises `RunError` if one is gone."""
        return [text] if self.count == 1 else _gather(text)


@dataclass(frozen=True)
class _Launcher:
    """Who started the processes, how many, and whether no two of them share a host."""

    name: str
    processes: int
    one_a_host: bool


def join(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: int = 300,
) -> Hosts:
    """Meet the other processes, within `timeout` seconds: those that are told, or those that SLURM, a TPU pod slice or
    Open MPI started; without them, for one process, or where they have met, nothing is done. To be called before jax is
    used.

    Raises `SpecError` for what cannot be meant and `RunError` where not all come.
    """
    told = (coordinator_address, num_processes, process_id)
    if num_processes == 1:
        return Hosts()
    if told != (None, None, None):
        launcher, own = _told(*told), None
    elif found := _found():
        launcher, own = found, () if found.one_a_host and "JAX_LOCAL_DEVICE_IDS" not in os.environ else None
    else:
        return Hosts()
    import jax

    if jax.distributed.is_initialized():
        return Hosts(jax.process_index(), jax.process_count())
    skip_absent_tpu()
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us, and knows no Ctrl-C
    initialize = partial(
        jax.distributed.initialize,
        coordinator_address,
        launcher.processes,
        process_id,
        local_device_ids=own,  # (): all that are here, where jax would take one for each process
        cluster_detection_method="deactivate" if coordinator_address else None,
        initialization_timeout=timeout + GRACE,
        heartbeat_timeout_seconds=HEARTBEAT,
    )
    _within(timeout, initialize, launcher)
    _check_alike(launcher.processes, jax.local_device_count(), jax.device_count())
    return Hosts(jax.process_index(), jax.process_count())


def place(arrays: Any, sharding: "Sharding") -> Any:
    """A tree of arrays in this host's memory, the same on every host, laid out over the devices; or of arrays that lie
    on them already. `jax.device_put` would compare each array in memory with that of all other hosts."""
    import jax

    def placed(array: "jax.Array | np.ndarray | np.generic") -> "jax.Array":
        if isinstance(array, jax.Array):
            return jax.device_put(array, sharding)
        return jax.make_array_from_callback(array.shape, sharding, np.asarray(array).__getitem__)

    return jax.tree.map(placed, arrays)


def fetch(array: "jax.Array") -> np.ndarray:
    """All of an array in this host's memory, wherever its parts lie: several hosts call it together."""
    return np.asarray(_replicated(array))


def fetch_on_first(array: "jax.Array") -> np.ndarray | None:
    """All of an array in the first host's memory; None on the others, which call it too: their devices send their
    parts."""
    import jax

    whole = _replicated(array)
    return np.asarray(whole) if jax.process_index() == 0 else None


def _replicated(array: "jax.Array") -> "jax.Array":
    """`array` where this host can read it: whole on each of the devices that it lies on, if it lies on other hosts."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return array
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    assert isinstance(array.sharding, NamedSharding)
    return jax.jit(_same, out_shardings=NamedSharding(array.sharding.mesh, PartitionSpec()))(array)


def _same(array: "jax.Array") -> "jax.Array":
    return array


def any_host(*flags: bool) -> list[bool]:
    """Each of the flags: whether any host has it. Several hosts call it together, and each waits for the last."""
    import jax

    if jax.process_count() == 1:
        return list(flags)
    from jax.experimental.multihost_utils import process_allgather

    return [bool(flag) for flag in process_allgather(np.array(flags)).any(axis=0)]


def is_shared(folder: Path) -> bool:
    """Whether it is the same folder on all hosts. They call it together; the first must be able to write there."""
    import jax

    hosts = Hosts(jax.process_index(), jax.process_count())
    with NamedTemporaryFile(dir=folder, prefix=".shared-") if hosts.first else nullcontext() as file:
        name = hosts.gather(Path(file.name).name if file else "")[0]
        (hidden,) = any_host(not (folder / name).exists())
    return not hidden


def end_with_others(end: Callable[[], None]) -> None:
    """From now on, call `end` once another host is interrupted. A thread asks the coordination service, since this
    host's main thread may be waiting for that host."""
    Thread(target=_watch, args=(end,), daemon=True).start()


def end_others() -> None:
    """End all other hosts. The first waits until they know: without it, the coordination service is gone."""
    import jax

    from ltx2_cli.private_api import coordination_client

    client, deadline = coordination_client(), time.monotonic() + LAST_WORDS
    with suppress(jax.errors.JaxRuntimeError):
        _say_interrupted(client)
        while jax.process_index() == 0 and _interrupted(client) < jax.process_count() and time.monotonic() < deadline:
            time.sleep(POLL)


def _watch(end: Callable[[], None]) -> None:
    import jax

    from ltx2_cli.private_api import coordination_client

    client = coordination_client()
    with suppress(jax.errors.JaxRuntimeError):  # the service is gone: at the end of the run, or jax ends the process
        while not _interrupted(client):
            time.sleep(POLL)
        _say_interrupted(client)
        end()


def _interrupted(client: Any) -> int:
    """How many hosts said that they are interrupted, or know that another is."""
    return len(client.key_value_dir_get(INTERRUPTED))


def _say_interrupted(client: Any) -> None:
    import jax

    client.key_value_set(f"{INTERRUPTED}/{jax.process_index()}", "", allow_overwrite=True)


def _check_alike(processes: int, here: int, in_all: int) -> None:
    if here * processes != in_all:
        raise SpecError(
            f"the {processes} processes have {in_all} devices, but this one has {here}",
            "start on hosts that are alike, one process a host or a device",
        )


def _told(address: str | None, processes: int | None, process: int | None) -> _Launcher:
    if address is None or processes is None or process is None:
        raise SpecError("several hosts are told of in part: address, number and own number belong together", BY_HAND)
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise SpecError(f"coordinator_address {address} is not HOST:PORT", "for example: 10.0.0.1:8476, of process 0")
    if not 0 <= process < processes:
        raise SpecError(f"process_id {process} is not one of {processes} processes", BY_HAND)
    return _Launcher("the command line", processes, False)


def _found() -> _Launcher | None:
    """What started several processes of this program, if anything did."""
    variable = os.environ.get
    if (tasks := int(variable("SLURM_STEP_NUM_TASKS", 1))) > 1:
        return _Launcher("SLURM", tasks, tasks == int(variable("SLURM_STEP_NUM_NODES", 1)))
    if (ranks := int(variable("OMPI_COMM_WORLD_SIZE", 1))) > 1:
        return _Launcher("Open MPI", ranks, variable("OMPI_COMM_WORLD_LOCAL_SIZE") == "1")
    if (workers := _tpu_workers()) > 1:
        return _Launcher("the TPU pod slice", workers, True)
    return None


def _tpu_workers() -> int:
    """The hosts whose TPUs belong together, this one included; 1 where there is no TPU or another one is not wanted."""
    variable = os.environ.get
    if "tpu" not in variable("JAX_PLATFORMS", "tpu") or not any(map(glob, TPU_DEVICES)):
        return 1
    names = variable("TPU_PROCESS_ADDRESSES") or variable("TPU_WORKER_HOSTNAMES")
    if names is None and "TPU_SKIP_MDS_QUERY" not in os.environ:
        names = _described()
    return len((names or "").split(",")) * int(variable("MEGASCALE_NUM_SLICES", 1))


def _described() -> str:
    """The hosts of its slice, as a virtual machine of Google's cloud is told of them; nothing on another machine."""
    from urllib.request import Request, urlopen  # takes 0.1 s, and is needed there alone

    with suppress(OSError), urlopen(Request(METADATA, headers={"Metadata-Flavor": "Google"}), timeout=2) as answer:
        return answer.read().decode()
    return ""


def _within(seconds: int, initialize: Callable[[], None], launcher: _Launcher) -> None:
    """Call it in a thread of its own: where it waits in vain jax aborts the process, with a stack trace."""
    import jax

    try:
        ThreadPoolExecutor(1).submit(initialize).result(seconds)
    except TimeoutError:
        raise RunError(
            f"not all of the {launcher.processes} processes of {launcher.name} met within {seconds} s",
            f"start the same command on every host; --initialization-timeout waits longer, {ALONE}",
        ) from None
    except ValueError as error:
        raise SpecError(
            f"jax does not find the {launcher.processes} processes of {launcher.name}: {error}", BY_HAND
        ) from error
    except jax.errors.JaxRuntimeError as error:
        raise RunError(
            f"the {launcher.processes} processes of {launcher.name} cannot meet: {error}", BY_HAND
        ) from error


def _gather(text: str) -> list[str]:
    import jax
    from jax.experimental.multihost_utils import process_allgather

    said = np.frombuffer(text.encode(), np.uint8)
    try:
        lengths = process_allgather(np.int32(len(said)))
        rows = process_allgather(np.pad(said, (0, max(lengths) - len(said))))
    except jax.errors.JaxRuntimeError as error:
        raise lost(error) from error
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]


def lost(error: Exception) -> RunError:
    """What to say of an error of the devices, which is also what is left of a host that is gone."""
    first_line = str(error).splitlines()[0]
    return RunError(f"another host ended, or a device failed: {first_line}", "the host that ended first says why")
