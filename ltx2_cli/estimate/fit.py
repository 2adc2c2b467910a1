"""Whether a request fits into the memory of its devices, and what to say where it does not."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax

from ltx2_cli.chips import CHIPS, chip
from ltx2_cli.errors import DoesNotFitError, UsageError
from ltx2_cli.estimate.estimate import Estimate
from ltx2_cli.estimate.phases import DECODE
from ltx2_cli.estimate.requests import FRACTION, Alternative, Request, Suggestions, available_memory
from ltx2_cli.estimate.topology import slices, topology
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.profiles import AUTO, read_sharding
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.units import quantity

Typed = Callable[[Alternative], str]


def check_fit(request: Request, plan: Plan, typed: Typed) -> None:
    """Raise `DoesNotFitError` if a phase of the request's plan needs more memory than a device has, with the nearest
    request that fits as a hint, spelt by `typed`. Nothing is compiled, loaded or downloaded. Unknown memory is
    enough."""
    available, memories, device = available_memory(plan), request.memory(plan), request.devices[0]
    phase, memory = max(memories.items(), key=lambda item: item[1].peak)
    if memory.peak <= available.limit:
        return
    limit, total = quantity(int(available.limit)), quantity(int(available.total))
    has = f"a {device.device_kind} has {limit}"
    if device.platform == "cpu":
        has = f"this machine has {limit} for each of its devices"
    elif available.total > available.limit:
        has += f", the {available.limit / available.total:.0%} of its {total} that jax takes"
    needs = f"to {phase} takes about {quantity(memory.peak)} of a device, {quantity(memory.weights)} of it for weights"
    if memory.peak == int(available.limit) + 1:  # it stands for what a compiler did not say
        needs = f"to {phase} takes more"
    elif memory.loading > memory.weights + memory.activations:
        needs = f"to load what it takes to {phase} takes {quantity(memory.loading)} of a device"
    raise DoesNotFitError(f"this does not fit: {needs}; {has}", _hints(Suggestions(request, plan), typed))


def check_estimate(
    spec: RunSpec, devices: Sequence[jax.Device], estimate: Estimate, on_slice: bool, typed: Typed
) -> None:
    """`check_fit` by compiled programs: estimates of alternatives are scaled as this plan's differ from them."""
    corrections = {
        phase: estimate.memory[phase].activations / formula.activations
        for phase, formula in estimate.uncompiled.items()
        if formula.activations
    }
    request = Request(spec, devices, fixed="model".__eq__, corrections=corrections, on_slice=on_slice)
    check_fit(request, estimate.plan, typed)


def _hints(search: Suggestions, typed: Typed) -> list[str]:
    """The nearest request that fits; and devices that would do, if it has another model or nothing fits."""
    nearest, larger = search.nearest(), _larger_slice(search)
    hints = [_sufficient(search)] if nearest is None or nearest.anew else [typed(nearest)]
    if nearest and nearest.anew:
        hints.append(f"or a miniature, here: {typed(nearest)}")
    return [*hints, f"or more chips: {typed(larger)}"] if larger else hints


def _larger_slice(search: Suggestions) -> Alternative | None:
    """The same request on the smallest larger TPU slice that it fits, if the devices are those of a slice."""
    request, sharding = search.request, search.plan.spec.sharding
    known = chip(request.devices[0].device_kind) if request.on_slice else None
    auto = sharding if sharding.mesh else replace(sharding, profile=AUTO)
    for name in slices(known) if known else ():
        devices = topology(name)
        alternative = Alternative({"sharding": auto}, {"topology": name})
        larger = Suggestions(replace(request, devices=devices), search.plan)
        if len(devices) > len(request.devices) and larger.fits(alternative):
            return alternative
    return None


def _sufficient(search: Suggestions) -> str:
    """Devices that would do, by what a single one needs."""
    alone = Alternative({"sharding": read_sharding("single"), "keep_resident": False})
    try:
        memory = search.request.memory(search.altered(alone))
    except UsageError:
        return "devices with more memory, or more of them"
    needed = max(need.loading if phase == DECODE else need.peak for phase, need in memory.items())
    names = [known.name for known in CHIPS if known.hbm_bytes * (1 if known.topology else FRACTION) >= needed]
    such = f", such as {', '.join(names)}" if names else ""
    return f"it takes a device with {quantity(needed)}{such}, or several that share the weights"
