"""A request that is to fit into the memory of devices, and changes of it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from ltx2_cli.devices import DeviceMemory, device_memory
from ltx2_cli.estimate.offline import plan_offline
from ltx2_cli.estimate.phases import PhaseMemory, phase_memory, run_phases
from ltx2_cli.outputs import Product
from ltx2_cli.plan.resolve import Plan, resolve, stage1_plan
from ltx2_cli.plan.stages import InitialLatents
from ltx2_cli.request.spec import RunSpec


class Alternative(NamedTuple):
    """A change of a request: values of the spec by field, and the text to type for them by dotted key."""

    values: Mapping[str, Any] = {}
    options: Mapping[str, str] = {}
    most_memory: bool = False  # jax is to take most of a GPU's memory
    anew: bool = False  # typed by itself, without the words of the request

    def also(self, *others: "Alternative") -> "Alternative":
        """Together with other changes."""
        alternatives = [self, *others]
        values = {key: value for alternative in alternatives for key, value in alternative.values.items()}
        options = {key: text for alternative in alternatives for key, text in alternative.options.items()}
        return Alternative(values, options, any(alternative.most_memory for alternative in alternatives))


def setting(**values: str | int | None) -> Alternative:
    """Other values of the spec, typed as they are."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return Alternative(values, texts)


def available_memory(plan: Plan) -> DeviceMemory:
    """The memory of each device that a plan uses."""
    return device_memory(list(plan.sharding.mesh.devices.flat))


@dataclass(frozen=True)
class Request:
    """What is asked of which devices, and how far the command that asks carries it out."""

    spec: RunSpec  # recipe and devices may have left values open
    devices: Sequence[jax.Device]
    source: InitialLatents | None = None  # latents that the run goes on from
    product: Product = Product.clips
    skipped: frozenset[str] = frozenset()  # phases that the command does not run
    fixed: Callable[[str], bool] = frozenset[str]().__contains__  # dotted keys that it cannot change
    on_slice: bool = False  # the devices are those of a described TPU slice: another may be named
    corrections: Mapping[str, float] = field(default_factory=dict)  # compiled activations by phase, in estimates

    def plan(self) -> Plan:
        """What the request means, from configs alone. Raises `UsageError` where it cannot be met."""
        return self.until_end(plan_offline(self.spec, self.devices, self.source))

    def resolved(self) -> Plan:
        """What the request means, by the files of its networks, which are downloaded if they are not here.

        Raises `UsageError` where it cannot be met.
        """
        return self.until_end(resolve(self.spec, self.source))

    def until_end(self, plan: Plan) -> Plan:
        """The part of a plan that the command carries out."""
        return stage1_plan(plan) if self.product is Product.drafts else plan

    def memory(self, plan: Plan) -> dict[str, PhaseMemory]:
        """What each phase of a plan of this request needs of a device."""
        phases = [phase for phase in run_phases(plan, self.product) if phase not in self.skipped]
        return {
            phase: memory._replace(activations=round(memory.activations * self.corrections.get(phase, 1)))
            for phase, memory in phase_memory(plan, phases).items()
        }
