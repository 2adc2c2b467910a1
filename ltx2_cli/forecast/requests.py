"""A request that is to fit into the memory of devices, and what may be asked instead of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax

from ltx2_cli.device_memory import DeviceMemory, device_memory
from ltx2_cli.forecast.configs import foresee
from ltx2_cli.forecast.phases import PhaseMemory, phase_memory, run_phases
from ltx2_cli.outputs import Ends
from ltx2_cli.plan import Declared, Plan, decide, first_stage, resolve
from ltx2_cli.spec import RunSpec
from ltx2_cli.stages import Source

# What may be asked otherwise of the same networks.
SAME_NETWORKS = {
    "height",
    "width",
    "num_frames",
    "num_videos",
    "max_sequence_length",
    "sharding",
    "keep_resident",
    "vae_memory",
    "refinement",
}


class Alternative(NamedTuple):
    """What is asked otherwise: values of the spec by field, and what is typed for them by dotted key."""

    values: Mapping[str, Any] = {}
    options: Mapping[str, str] = {}
    most_memory: bool = False  # jax is to take most of a GPU's memory
    anew: bool = False  # typed by itself, without what was typed before

    def also(self, *others: "Alternative") -> "Alternative":
        """With what others ask besides."""
        alternatives = [self, *others]
        values = {key: value for alternative in alternatives for key, value in alternative.values.items()}
        options = {key: value for alternative in alternatives for key, value in alternative.options.items()}
        return Alternative(values, options, any(alternative.most_memory for alternative in alternatives))


def available_memory(plan: Plan) -> DeviceMemory:
    """The memory of each device that a plan uses."""
    return device_memory(list(plan.sharding.mesh.devices.flat))


@dataclass(frozen=True)
class Request:
    """What is asked of which devices, and how far the command that asks carries it out."""

    spec: RunSpec  # recipe and devices may have left values open
    devices: Sequence[jax.Device]
    source: Source | None = None  # latents that the run goes on from
    ends: Ends = Ends.clips
    skipped: frozenset[str] = frozenset()  # phases that the command does not run
    fixed: Callable[[str], bool] = frozenset[str]().__contains__  # dotted keys that it cannot change
    on_slice: bool = False  # the devices are those of a described TPU slice: another may be named
    corrections: Mapping[str, float] = field(default_factory=dict)  # compiled activations by phase, in estimates

    def plan(self) -> Plan:
        """What the request means, from configs alone. Raises `SpecError` where it cannot be met."""
        return self._until_end(foresee(self.spec, self.devices, self.source))

    def resolved(self) -> Plan:
        """What the request means, by the files of its networks, which are downloaded if they are not here.

        Raises `SpecError` where it cannot be met.
        """
        return self._until_end(resolve(self.spec, self.source))

    def altered(self, plan: Plan, alternative: Alternative, declared: Declared) -> Plan:
        """The plan where `alternative` is asked of the request that `plan` is of, whose networks are `declared`.

        Raises `SpecError` as `plan` does.
        """
        spec = replace(plan.spec, **alternative.values)
        if alternative.values.keys() <= SAME_NETWORKS:
            return self._until_end(decide(declared, spec, self.devices, self.source))
        return self._until_end(foresee(spec, self.devices, self.source))

    def _until_end(self, plan: Plan) -> Plan:
        return first_stage(plan) if self.ends is Ends.drafts else plan

    def memory(self, plan: Plan) -> dict[str, PhaseMemory]:
        """What each phase of a plan of this request needs of a device."""
        phases = [phase for phase in run_phases(plan, self.ends) if phase not in self.skipped]
        return {
            phase: memory._replace(activations=round(memory.activations * self.corrections.get(phase, 1)))
            for phase, memory in phase_memory(plan, phases).items()
        }
