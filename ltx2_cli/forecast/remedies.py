"""What would fit where a plan does not: a smaller clip, another mesh, more chips."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax

from ltx2_cli.forecast.chips import slices, topology
from ltx2_cli.forecast.configs import declare_described
from ltx2_cli.forecast.forecast import DECODE, LOOPS, Forecast
from ltx2_cli.forecast.meshes import meshes
from ltx2_cli.plan import Plan, decide
from ltx2_cli.profiles import AUTO
from ltx2_cli.spec import FitError, SpecError
from ltx2_cli.weights.hub import gigabytes


def check_fit(forecast: Forecast, devices: Sequence[jax.Device]) -> None:
    """Raise `FitError` if a device cannot hold what the plan needs, with what would fit."""
    if forecast.fits:
        return
    needed = forecast.phase_bytes
    phase = max(needed, key=lambda phase: needed[phase])
    kind = forecast.plan.sharding.mesh.devices.flat[0].device_kind
    limit, least = gigabytes(int(forecast.hbm_bytes)), gigabytes(needed[phase])
    if needed[phase] > forecast.hbm_bytes:
        sentence = f"this does not fit: to {phase} takes {least} of a device, a {kind} has {limit}"
    else:
        sentence = f"this does not fit: to {phase} takes more of a device than the {limit} that a {kind} has"
    raise FitError(sentence, "\n      ".join(remedies(forecast, devices)) or "devices with more memory")


def remedies(forecast: Forecast, devices: Sequence[jax.Device]) -> list[str]:
    """What to type instead, estimated from weights and from what this plan needs beside them; nothing is compiled."""
    return [*_fewer_networks(forecast), *_smaller(forecast), *_other_mesh(forecast, devices), *_more_chips(forecast)]


def _fewer_networks(forecast: Forecast) -> Iterator[str]:
    needed = max(forecast.held_bytes(phase) + forecast.beside_bytes(phase) for phase in forecast.phases)
    if forecast.plan.spec.keep_resident and needed <= forecast.hbm_bytes:
        yield "a network at a time: --set keep_resident=false"


def _smaller(forecast: Forecast) -> Iterator[str]:
    """As many frames as what is beside the weights leaves room for, where that grows with the clip's length."""
    latents, growing = forecast.plan.stages[-1].geometry.frames, forecast.phases.keys() & {*LOOPS, DECODE}
    beside = {each: forecast.beside_bytes(each) for each in growing}
    room = {phase: forecast.hbm_bytes - forecast.held_bytes(phase) for phase in beside}
    fitting = min((int(latents * room[phase] / size) for phase, size in beside.items() if size), default=0)
    if 1 < fitting < latents:
        factor = forecast.plan.arch.compression.frames
        yield f"a smaller clip: about --num-frames {(fitting - 1) * factor + 1}"


def _other_mesh(forecast: Forecast, devices: Sequence[jax.Device]) -> Iterator[str]:
    for plan in (*_usual(forecast.plan, devices), *meshes(forecast.plan, devices)):
        if _holds(plan, forecast):
            settings = (f" --set sharding.mesh.{axis}={size}" for axis, size in plan.spec.sharding.mesh.items())
            yield f"another mesh:{_profile(plan, forecast) or ''.join(settings)}"
            return


def _more_chips(forecast: Forecast) -> Iterator[str]:
    if forecast.chip is None or not forecast.chip.topology:
        yield "more devices, or such with more memory"
        return
    for name in slices(forecast.chip):
        devices = topology(name)
        for plan in _usual(forecast.plan, devices) if len(devices) > forecast.devices else ():
            if _holds(plan, forecast):
                yield f"more chips: --topology {name}{_profile(plan, forecast)}"
                return


def _profile(plan: Plan, forecast: Forecast) -> str:
    name = plan.spec.sharding.profile
    return f" --sharding {name}" * (name != forecast.plan.spec.sharding.profile)


def _usual(plan: Plan, devices: Sequence[jax.Device]) -> Iterator[Plan]:
    """The plan on other devices: under its own profile, or where that is for one device, under the usual one."""
    sharding = plan.spec.sharding
    usual = sharding if sharding.mesh else replace(sharding, profile=AUTO)
    try:
        yield decide(declare_described(plan.spec, plan.checkpoint), replace(plan.spec, sharding=usual), devices)
    except SpecError:  # it does not divide, or no profile is for such devices
        return


def _holds(plan: Plan, forecast: Forecast) -> bool:
    """Whether a device holds another plan: its weights, and beside them what this one's programs need. How decoding is
    divided, each plan says itself."""
    other, beside = Forecast(plan), {phase: forecast.beside_bytes(phase) for phase in forecast.phases} | {DECODE: 0}
    return max(other.phase_bytes[phase] + beside[phase] for phase in beside) <= forecast.hbm_bytes
