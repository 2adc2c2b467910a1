"""Check whether a request fits into the memory of its devices; else choose what it leaves open, or refuse it with the
nearest one that fits."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from ltx2_cli.chips import CHIPS, chip
from ltx2_cli.core import run
from ltx2_cli.core.components import Components
from ltx2_cli.core.report import DECODE
from ltx2_cli.errors import DoesNotFitError, UsageError
from ltx2_cli.estimate.alternatives import (
    FRACTION,
    MOST_MESHES,
    PROGRAM_FRACTION,
    Alternative,
    Request,
    Suggestions,
    available_memory,
)
from ltx2_cli.estimate.estimate import Estimate
from ltx2_cli.estimate.offline import slices, topology
from ltx2_cli.parallel.devices import (
    RESERVE,
    RESERVE_REMARK,
    DeviceMemory,
    find_devices,
    fraction_variable,
)
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request import spelling
from ltx2_cli.request.profiles import AUTO, read_sharding
from ltx2_cli.request.spec import WeightType
from ltx2_cli.units import quantity

# by benchmarks/accuracy.md
CHANGES = {
    kind: f"changes latents: those of the demo by {percent} % of their norm"
    for kind, percent in {WeightType.int8: 4.7, WeightType.int4: 31.5}.items()
}

Typed = Callable[[Alternative], str]


def choose(request: Request, plan: Plan, planned: Callable[[Request], Plan] = Request.plan) -> Plan:
    """The plan if it fits or nothing does; else that of the first mesh that fits, of those that the request leaves
    open, then with matrices of int8. `planned` makes it; a warning says so."""
    if _peak(request, plan) <= available_memory(plan).limit:
        return plan
    search = Suggestions(request, plan)
    other = next(filter(search.fits, search.left_open()), None)
    if other is None:
        return plan
    chosen = planned(replace(request, spec=replace(plan.spec, **other.values)))
    return replace(chosen, warnings=(*chosen.warnings, _chosen(request, plan, chosen)))


def check_fit(request: Request, plan: Plan, typed: Typed, planned: Callable[[Request], Plan] = Request.plan) -> Plan:
    """The plan that `choose` takes. Raises `DoesNotFitError` if a phase of it needs more memory than a device has, with
    a hint: the nearest request that fits, spelled by `typed`. Compiles and loads nothing, and downloads no more than
    `planned`. Unknown memory is enough."""
    chosen = choose(request, plan, planned)
    _refuse(request, chosen, typed)
    return chosen


def _chosen(request: Request, profile: Plan, plan: Plan) -> str:
    """A sentence on a plan that takes the place of the profile's, which does not fit."""
    taken = [f"devices {plan.sharding.text}"] if plan.sharding.text != profile.sharding.text else []
    if plan.spec.weights != profile.spec.weights:
        taken.append(f"{spelling.typed('weights', plan.spec.weights)}, which {CHANGES[plan.spec.weights]}")
    needed, has = (quantity(int(size)) for size in (_peak(request, profile), available_memory(profile).limit))
    name = profile.spec.sharding.profile
    return f"the profile {name} takes about {needed} of a device that has {has}; chosen: {'; '.join(taken)}"


def _peak(request: Request, plan: Plan) -> int:
    """Bytes of a device that the plan needs in the largest of its phases."""
    return max(memory.peak for memory in request.memory(plan).values())


def _refuse(request: Request, plan: Plan, typed: Typed) -> None:
    """Raise `DoesNotFitError` if a phase of this very plan needs more memory than a device has."""
    _refuse_on_host(request, plan, typed)
    available, memories = available_memory(plan), request.memory(plan)
    phase, memory = max(memories.items(), key=lambda item: item[1].peak)
    if memory.peak <= available.limit:
        return
    has = _memory_sentence(request, available)
    needs = f"to {phase} takes about {quantity(memory.peak)} of a device, {quantity(memory.weights)} of it for weights"
    if memory.peak == int(available.limit) + 1:  # stands for a size that the compiler did not state
        needs = f"to {phase} takes more"
    elif memory.loading > memory.weights + memory.activations:
        needs = f"to load what it takes to {phase} takes {quantity(memory.loading)} of a device"
    raise DoesNotFitError(f"this does not fit: {needs}; {has}", _hints(Suggestions(request, plan), typed))


def _refuse_on_host(request: Request, plan: Plan, typed: Typed) -> None:
    """Raise `DoesNotFitError` if a phase needs more of the host's memory than it has for each of its devices."""
    if shortage := request.host_shortage(plan):
        needed, has = shortage
        offload = spelling.typed("offload", plan.spec.offload)
        sentence = f"{offload} takes {quantity(needed)} of this machine's memory for a device"
        hints = _hints(Suggestions(request, plan), typed)
        raise DoesNotFitError(f"this does not fit: {sentence}; it has {quantity(has)} for each", hints)


def _memory_sentence(request: Request, available: DeviceMemory) -> str:
    """The memory of each device of a request, as a part of a sentence."""
    device = request.devices[0]
    limit, total = quantity(int(available.limit)), quantity(int(available.total))
    if device.platform == "cpu":
        return f"this machine has {limit} for each of its devices"
    has = f"a {device.device_kind} has {limit}"
    if device.platform != "gpu":
        return has
    taken = available.limit / (1 - RESERVE) / available.total
    part = f" of its {total}" if request.on_slice else f", the {taken:.0%} of its {total} that jax takes"
    return f"{has}{part} without {RESERVE_REMARK}"


def load(plan: Plan) -> Components:
    """The networks of a plan, each loaded at its first use. Raises `DoesNotFitError` first if a phase needs more memory
    than a device has."""
    _refuse(Request(plan.spec, find_devices()), plan, in_python)
    return run.open_components(plan)


def in_python(alternative: Alternative) -> str:
    """An alternative, spelled in Python."""
    variable = [f"{fraction_variable()}={FRACTION} in the environment"] if alternative.most_memory else []
    settings = [f"{key}={value}" for key, value in alternative.options.items()]
    prompt = f"prompt={alternative.values['prompt']!r}" if alternative.standalone else "..."
    return " and ".join([*variable, *([f"read_spec({prompt}, dotlist={settings})"] if settings else [])])


def check_estimate(request: Request, estimate: Estimate, typed: Typed) -> None:
    """Raise `DoesNotFitError` as `check_fit`, by compiled programs: estimates of alternatives are scaled by this plan's
    ratio of compiled memory to formula."""
    corrections = {
        phase: estimate.memory[phase].activations / formula.activations
        for phase, formula in estimate.uncompiled.items()
        if formula.activations
    }
    _refuse(replace(request, corrections=corrections), estimate.plan, typed)


def _hints(search: Suggestions, typed: Typed) -> list[str]:
    """Hints: the nearest request that fits; also devices that suffice, if it has another model or nothing fits."""
    nearest, larger = search.nearest(), _larger_slice(search)
    hints = [_sufficient(search)] if nearest is None or nearest.standalone else [typed(nearest)]
    if nearest and nearest.values.get("weights") is WeightType.int4:
        hints.append(f"int4 {CHANGES[WeightType.int4]}")
    if nearest and nearest.standalone:
        hints.append(f"or the demo: {typed(nearest)}")
    for narrow in search.with_fewer_bytes_to_copy(nearest) if nearest else ():
        hints.append(f"or with fewer bytes to copy: {typed(narrow)}, which {CHANGES[narrow.values['weights']]}")
    return [*hints, f"or more chips: {typed(larger)}"] if larger else hints


def _larger_slice(search: Suggestions) -> Alternative | None:
    """The same request on the smallest larger TPU slice or number of GPUs that it fits, in the profile's mesh or
    another one; if the devices are described."""
    request, sharding = search.request, search.plan.spec.sharding
    known = chip(request.devices[0].device_kind) if request.on_slice else None
    auto = sharding if sharding.mesh else replace(sharding, profile=AUTO)
    for name in slices(known) if known else ():
        devices = topology(name)
        alternative = Alternative({"sharding": auto}, {"topology": name})
        larger = Suggestions(replace(request, devices=devices), search.plan)
        if len(devices) <= len(request.devices):
            continue
        if larger.fits(alternative):
            return alternative
        with suppress(UsageError):  # the profile's mesh does not divide the request
            there = Suggestions(larger.request, larger.altered(alternative))
            if mesh := next(filter(there.fits, islice(there.meshes(Alternative()), MOST_MESHES)), None):
                return alternative.also(mesh)
    return None


def _sufficient(search: Suggestions) -> str:
    """A sentence on devices that suffice, by the memory of a single one."""
    alone = Alternative({"sharding": read_sharding("single"), "keep_resident": False})
    try:
        memory = search.request.memory(search.altered(alone))
    except UsageError:
        return "devices with more memory, or more of them"
    needed = max(need.loading if phase == DECODE else need.peak for phase, need in memory.items())
    names = [known.name for known in CHIPS if known.hbm_bytes * (1 if known.topology else PROGRAM_FRACTION) >= needed]
    such = f", such as {', '.join(names)}" if names else ""
    return f"it takes a device with {quantity(needed)}{such}, or several that share the weights"
