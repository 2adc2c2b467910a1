"""`ltx2 plan`: memory and time of a clip, without weights, on devices that may be absent."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax

from ltx2_cli.console import columns, print_out, visible
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import programs
from ltx2_cli.estimate.alternatives import Request
from ltx2_cli.estimate.collectives import Collective, sent_bytes
from ltx2_cli.estimate.compiled import Compiled, write_hlo
from ltx2_cli.estimate.cycles import REMARKS, Cycles, dumped_schedules
from ltx2_cli.estimate.estimate import (
    FORWARD,
    ROOFLINE,
    Estimate,
    assumptions,
    compile_and_estimate,
    forward_programs,
    record,
)
from ltx2_cli.estimate.fit import Typed, check_estimate, choose
from ltx2_cli.estimate.offline import MeshSearch, search_meshes, topology
from ltx2_cli.parallel.devices import RESERVE_REMARK, find_devices
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.runs.summary import request_rows
from ltx2_cli.units import duration, quantity


@dumped_schedules()
def print_plan(
    spec: RunSpec,
    report: Report,
    typed: Typed,
    *,
    slice_name: str | None,
    search: bool,
    everything: bool,
    dump: Path | None,
    as_json: bool,
) -> None:
    """Print the plan of a request and its estimate, for a slice or the local devices: after a `search` of meshes, from
    the forwards or `everything`. The programs go into the folder `dump`. Raises `DoesNotFitError` afterwards if it does
    not fit, with an alternative that fits, spelt by `typed`."""
    if slice_name is not None:
        jax.config.update("jax_platforms", "cpu")  # the machine's accelerators stay unused
    if dump:
        dump.mkdir(parents=True, exist_ok=True)
    devices = topology(slice_name) if slice_name is not None else tuple(find_devices())
    request = Request(spec, devices, fixed="model".__eq__, on_slice=slice_name is not None)
    chosen = choose(request, request.plan())
    meshes = search_meshes(chosen, devices, report) if search else None
    best = meshes.best if meshes else None
    if best and not everything:
        estimate = best
    else:
        chosen = best.plan if best else chosen
        others = programs(chosen) if everything else ()
        estimate = compile_and_estimate(chosen, [*forward_programs(chosen), *others], report)
    if dump:
        write_hlo(estimate.compiled, dump)
    if as_json:
        print_out(json.dumps({**record(estimate), **(meshes.record() if meshes else {})}, indent=2))
    else:
        print_out("\n".join(map(visible, [*(search_lines(meshes) if meshes else ()), *estimate_lines(estimate)])))
    check_estimate(request, estimate, typed)
    report.flush()


def estimate_lines(estimate: Estimate) -> Iterator[str]:
    """The page of `ltx2 plan`, with a heading for each part."""
    warnings = [("note", warning) for warning in estimate.warnings]
    yield from columns([*request_rows(estimate.plan, estimate.memory), *warnings])
    yield from ("", *_memory(estimate))
    names = [f", stage {number}" for number in range(1, len(estimate.stages) + 1)] if estimate.stages[1:] else [""]
    once = [stage.stage.forwards == stage.stage.steps for stage in estimate.stages]
    timed = [("step" if single else "forward") + name for single, name in zip(once, names, strict=True)]
    for number, name in enumerate(names):
        yield from ("", f"one forward of a device{name}", *_forward(estimate, number))
    if estimate.expected_seconds and not estimate.unmeasured:
        yield from ("", "expected time, not measured on hardware")
        steps = zip(timed, estimate.stages, strict=True)
        rows = [(f"  {name}", stage.expected_seconds.text, "") for name, stage in steps if stage.expected_seconds]
        each = ", ".join(f"{phase} {time.text}" for phase, time in estimate.expected_phase_seconds.items())
        yield from columns([*rows, ("  clip", estimate.expected_seconds.text, each)], right=(1,))
    if estimate.expected_seconds:
        yield from ("", f"least time: {ROOFLINE if estimate.unmeasured else 'no run is faster'}")
        rows = []
        for name, stage in zip(timed, estimate.stages, strict=True):
            parts = (stage.roofline_seconds or {}).items()
            rows.append((f"  {name}", duration(stage.seconds_per_step or 0), _durations(parts)))
        phases = estimate.phase_seconds
        rows.append(("  clip", duration(sum(phases.values())), _durations(phases.items())))
        yield from columns(rows, right=(1,))
        yield from (f"  if {assumption}" for assumption in assumptions(estimate.plan))
    for name, stage in zip(timed, estimate.stages, strict=True):
        if stage.forward and (cycles := stage.forward.cycles) and stage.roofline_seconds:
            yield from ("", *_cycles(name, cycles, stage.roofline_seconds["compute"]))
    yield from _others(estimate.compiled)


def _memory(estimate: Estimate) -> Iterator[str]:
    limit = estimate.device_bytes
    reserve = f" without {RESERVE_REMARK}" if estimate.unmeasured else ""
    yield "memory of a device" + ("" if math.isinf(limit) else f", of {quantity(int(limit))}{reserve}")
    rows = []
    for phase, memory in estimate.memory.items():
        about = "about " if memory == estimate.uncompiled[phase] else ""
        parts = f"weights {quantity(memory.weights)}, beside them {about}{quantity(memory.activations)}"
        if memory.loading > memory.weights + memory.activations:
            parts += f"; {quantity(memory.loading)} while it is loaded"
        rows.append((f"  {phase}", quantity(memory.peak), parts, "" if memory.peak <= limit else "does not fit"))
    yield from columns(rows, right=(1,))


def _forward(estimate: Estimate, number: int) -> Iterator[str]:
    """One forward of a stage. Collectives of one kind along the same axes are one row, in falling order of bytes."""
    forward = estimate.stages[number].forward
    rows = [("  work", quantity(estimate.stages[number].flops, "FLOP"), "", "", "")]
    if forward is None:
        reasons = [failure.reason for failure in estimate.failures] or ["the weights do not fit"]
        yield from columns([*rows, ("  not compiled", "", "", reasons[0], "")], right=(1,))
        return
    sizes = vars(forward.memory).items()
    rows += [(f"  {name.removesuffix('_bytes')}", quantity(size), "", "", "") for name, size in sizes]
    waits = ""
    if forward.sent_bytes and forward.waiting_seconds is not None:
        waits = f"arithmetic waits for {duration(forward.waiting_seconds)} of it"
    elif forward.sent_bytes:
        waited_for = sent_bytes(collective for collective in forward.collectives if not collective.asynchronous)
        waits = f"{quantity(waited_for)} not overlapped"
    rows.append(("  sends", quantity(forward.sent_bytes), _link_time(forward.collectives), waits, ""))
    groups: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for collective in forward.collectives:
        groups.setdefault((collective.kind, collective.axes), []).append(collective)
    for (kind, axes), group in sorted(groups.items(), key=lambda item: -sent_bytes(item[1])):
        times = sum(collective.times for collective in group)
        along = f"along {', '.join(axes)}" if axes else ""
        rows.append((f"    {kind}", quantity(sent_bytes(group)), _link_time(group), along, f"{times} times"))
    yield from columns(rows, right=(1, 2))
    yield f"  compiled in {forward.compile_seconds:.0f} s"


def _link_time(collectives: Sequence[Collective]) -> str:
    """Time of collectives at the published rates of their links."""
    seconds = sum(collective.seconds or 0 for collective in collectives)
    return duration(seconds) if seconds else ""


def _cycles(step: str, cycles: Cycles, least: float) -> Iterator[str]:
    """Cycles of a forward by parts of the network, from the compiler; `least`: the seconds of its arithmetic at the
    chip's rate."""
    yield f"by {cycles.clock}: nothing was run"
    ratio = f"{cycles.seconds / least:.2f} times its work at the chip's rate"
    rows = [(f"  {step}", duration(cycles.seconds), f"{cycles.total / 1e6:.3g} M cycles, {ratio}")]
    for scope, number in sorted(cycles.by_scope.items(), key=lambda row: -row[1]):
        rows.append((f"    {scope}", duration(number / cycles.hertz), f"{number / 1e6:.3g} M cycles"))
    yield from columns(rows, right=(1,))
    yield f"  dearest but for products: {cycles.dearest}, {cycles.dearest_cycles / 1e6:.3g} M cycles"
    yield f"  without {REMARKS[cycles.clock].format(cycles.kernels / 1e6)}"
    if cycles.searching:
        search = f"finding the largest score takes {cycles.searching / 1e6:.3g} M more"
        yield f"  if |q|·|k| of each head stays below a bound; where it does not, {search}"


def _others(programs: Iterable[Compiled]) -> Iterator[str]:
    """The programs of `--all` except the forwards."""
    rows = []
    for program in programs:
        if program.cycles and not program.name.startswith(FORWARD):
            cycles = program.cycles
            ratio = f", {cycles.total / cycles.products:.1f} times their products" if cycles.products else ""
            rows.append((f"  {program.name}", duration(cycles.seconds), f"{cycles.total / 1e6:.3g} M cycles{ratio}"))
    if rows:
        yield from ("", "the other programs, by the same clock", *columns(rows, right=(1,)))


def search_lines(search: MeshSearch) -> Iterator[str]:
    """Each mesh that was tried, the chosen one, and the reason."""
    yield f"meshes, the cheapest first; {search.seconds:.0f} s"
    heading = "" if any(candidate.unmeasured for candidate in search.tried) else "expected"
    rows = [("  mesh", "a device needs", "sends", "least step", heading)]
    for candidate in search.tried:
        stage, sends, least, expected = candidate.stages[0], "does not fit", "", ""
        if candidate.fits:
            sends = quantity(stage.forward.sent_bytes) if stage.forward else "not compiled"
            least = duration(stage.seconds_per_step) if stage.seconds_per_step and stage.forward else ""
            expected = stage.expected_seconds.text if stage.expected_seconds and not candidate.unmeasured else ""
        needs = quantity(max(candidate.phase_bytes.values()))
        rows.append((f"  {candidate.plan.sharding.text}", needs, sends, least, expected))
    yield from columns(rows, right=(1, 2, 3, 4))
    if search.best is None:
        yield "none of them fits"
    else:
        yield f"chosen: {search.best.plan.sharding.text}; its step is the shortest, of equal ones it sends least"
    yield ""


def _durations(parts: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{part} {duration(seconds)}" for part, seconds in parts)
