"""Several hosts, one process each: their connection and agreement. Imports jax only where there are several."""

import os
import re
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from glob import glob
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Thread
from typing import NamedTuple

import numpy as np

from ltx2_cli.background import in_background
from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.parallel.devices import TPU_DEVICES, skip_absent_tpu

BY_HAND = "--coordinator-address HOST:PORT --num-processes N --process-id I on each host, I from 0 to N - 1"
ALONE = "--num-processes 1 runs alone"
HEARTBEAT_TIMEOUT = 30  # seconds without a sign of life after which a host counts as dead, and all others end
POLL = 0.2  # seconds between two checks for interrupted hosts
END_TIMEOUT = 2.0  # seconds that the first host waits until all know
INTERRUPTED_KEY = "ltx2/interrupted"  # coordination service: an entry for each host that is interrupted or knows it
ABORT_GRACE = 10  # seconds that jax, whose timeout aborts the process, waits longer than we do
METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/worker-network-endpoints"


@dataclass(frozen=True)
class ProcessGroup:
    """The index of this process, among the `count` processes of one command."""

    index: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes files and messages."""
        return self.index == 0

    def allgather_text(self, text: str) -> list[str]:
        """The texts of all processes, in order. All call it together; raises `RunError` if one is gone."""
        if self.count == 1:
            return [text]
        import jax
        from jax.experimental.multihost_utils import process_allgather

        own = np.frombuffer(text.encode(), np.uint8)
        try:
            lengths = process_allgather(np.int32(len(own)))
            rows = process_allgather(np.pad(own, (0, max(lengths) - len(own))))
        except jax.errors.JaxRuntimeError as error:
            raise device_error(error) from error
        return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]


class _Launcher(NamedTuple):
    """The program that started the processes, their number, and whether each has a host of its own."""

    name: str
    processes: int
    one_per_host: bool


def init_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: int = 300,
) -> ProcessGroup:
    """Connect to the other processes within `timeout` seconds: those of the arguments, or those that SLURM, a TPU pod
    slice or Open MPI started. Call it before jax is used. It does nothing for one process, or once connected. Raises
    `UsageError` for impossible arguments and `RunError` where not all processes connect."""
    if num_processes == 1:
        return ProcessGroup()
    if (coordinator_address, num_processes, process_id) == (None, None, None):
        launcher = _detect_launcher()
    else:
        launcher = _stated_launcher(coordinator_address, num_processes, process_id)
    if launcher is None:
        return ProcessGroup()
    import jax

    if not jax.distributed.is_initialized():
        skip_absent_tpu()
        jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us, and ignores Ctrl-C
        all_devices = launcher.one_per_host and "JAX_LOCAL_DEVICE_IDS" not in os.environ
        initialize = partial(
            jax.distributed.initialize,
            coordinator_address,
            launcher.processes,
            process_id,
            local_device_ids=() if all_devices else None,  # otherwise jax gives each process one device
            cluster_detection_method="deactivate" if coordinator_address else None,
            initialization_timeout=timeout + ABORT_GRACE,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
        )
        _call_within(timeout, initialize, launcher)
    return ProcessGroup(jax.process_index(), jax.process_count())


def _stated_launcher(address: str | None, processes: int | None, process: int | None) -> _Launcher:
    """The processes of the command line."""
    if address is None or processes is None or process is None:
        raise UsageError("address, number of processes and process id belong together, and some are missing", BY_HAND)
    parse_address(address)
    if not 0 <= process < processes:
        raise UsageError(f"process_id {process} is not one of {processes} processes", BY_HAND)
    return _Launcher("the command line", processes, False)


def parse_address(address: str) -> tuple[str, int]:
    """The host and the port of HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not (host and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 2**16):
        raise UsageError(f"coordinator_address {address} is not HOST:PORT", "for example: 10.0.0.1:8476, of process 0")
    return host, int(port)


def _detect_launcher() -> _Launcher | None:
    """The launcher of several processes, if there is one. `jax.distributed.initialize` detects the rest; without this
    check it would wait for tasks that a batch script has not started."""
    variable = os.environ.get
    tasks, ranks = int(variable("SLURM_STEP_NUM_TASKS", 1)), int(variable("OMPI_COMM_WORLD_SIZE", 1))
    if tasks > 1:
        return _Launcher("SLURM", tasks, tasks == int(variable("SLURM_STEP_NUM_NODES", 1)))
    if ranks > 1:
        return _Launcher("Open MPI", ranks, variable("OMPI_COMM_WORLD_LOCAL_SIZE") == "1")
    if "tpu" not in variable("JAX_PLATFORMS", "tpu") or not any(map(glob, TPU_DEVICES)):
        return None
    names = variable("TPU_PROCESS_ADDRESSES") or variable("TPU_WORKER_HOSTNAMES")
    if names is None and "TPU_SKIP_MDS_QUERY" not in os.environ:
        from urllib.request import Request, urlopen  # takes 0.1 s

        request = Request(METADATA, headers={"Metadata-Flavor": "Google"})
        with suppress(OSError), urlopen(request, timeout=2) as answer:  # in Google's cloud
            names = answer.read().decode()
    workers = len((names or "").split(",")) * int(variable("MEGASCALE_NUM_SLICES", 1))
    return _Launcher("the TPU pod slice", workers, True) if workers > 1 else None


def _call_within(seconds: int, initialize: Callable[[], None], launcher: _Launcher) -> None:
    """Call `initialize` in a thread: jax's own timeout aborts the process with a stack trace."""
    import jax

    processes = f"the {launcher.processes} processes of {launcher.name}"
    try:
        in_background("initialize", [initialize])[0].result(seconds)
    except TimeoutError:
        hint = f"start the same command on every host; --initialization-timeout waits longer, {ALONE}"
        raise RunError(f"not all of {processes} met within {seconds} s", hint) from None
    except ValueError as error:
        raise UsageError(f"jax does not find {processes}: {error}", BY_HAND) from error
    except jax.errors.JaxRuntimeError as error:
        raise RunError(f"{processes} cannot meet: {error}", BY_HAND) from error
    local, total = jax.local_device_count(), jax.device_count()
    if local * launcher.processes != total:
        sentence = f"the {launcher.processes} processes have {total} devices, but this one has {local}"
        raise UsageError(sentence, "start on hosts that are alike, one process a host or a device")


def any_host(*flags: bool) -> list[bool]:
    """For each flag, whether it is set on any host. All hosts call it together."""
    import jax

    if jax.process_count() == 1:
        return list(flags)
    from jax.experimental.multihost_utils import process_allgather

    return [bool(flag) for flag in process_allgather(np.array(flags)).any(axis=0)]


def is_shared(folder: Path) -> bool:
    """Whether all hosts see one folder, to which the first can write. All hosts call it together."""
    import jax

    group = ProcessGroup(jax.process_index(), jax.process_count())
    with NamedTemporaryFile(dir=folder, prefix=".shared-") if group.first else nullcontext() as file:
        name = group.allgather_text(Path(file.name).name if file else "")[0]
        (hidden,) = any_host(not (folder / name).exists())
    return not hidden


def end_with_others(end: Callable[[], None]) -> None:
    """Call `end` once another host is interrupted. A thread polls the coordination service, as the main thread may wait
    for that host."""
    import jax

    from ltx2_cli.private_api import coordination_client

    client = coordination_client()

    def watch() -> None:
        with suppress(jax.errors.JaxRuntimeError):  # the service has ended, as the run or the first host has
            while not client.key_value_dir_get(INTERRUPTED_KEY):
                time.sleep(POLL)
            client.key_value_set(f"{INTERRUPTED_KEY}/{jax.process_index()}", "", allow_overwrite=True)
            end()

    Thread(target=watch, daemon=True).start()


def end_others() -> None:
    """End all other hosts. The first waits until they know, since the coordination service ends with it."""
    import jax

    from ltx2_cli.private_api import coordination_client

    client, deadline = coordination_client(), time.monotonic() + END_TIMEOUT
    with suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(f"{INTERRUPTED_KEY}/{jax.process_index()}", "", allow_overwrite=True)
        while jax.process_index() == 0 and time.monotonic() < deadline:
            if len(client.key_value_dir_get(INTERRUPTED_KEY)) == jax.process_count():
                break
            time.sleep(POLL)


def device_error(error: Exception) -> RunError:
    """The error for a failed device or collective: usually another host ended."""
    first_line = str(error).splitlines()[0]
    return RunError(f"another host ended, or a device failed: {first_line}", "the host that ended first says why")
