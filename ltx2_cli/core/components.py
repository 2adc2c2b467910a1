"""The networks on the devices: each is loaded when its phase begins and, unless kept resident, dropped after it."""

from collections.abc import Iterable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx

from ltx2_cli.core.compiling import Ahead, compiled_ahead
from ltx2_cli.core.programs import Program
from ltx2_cli.core.report import Report
from ltx2_cli.plan import Plan
from ltx2_cli.spec import NotFiniteError, RunError
from ltx2_cli.weights.declare import Weight, map_weights
from ltx2_cli.weights.findings import some
from ltx2_cli.weights.load import Placement, load, not_finite


class Components:
    """A plan's networks with their weights, by the names of its `networks`: `with components.use("vae", report)`."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.resident: dict[str, nnx.Module] = {}
        self.ahead: Ahead = {}

    @contextmanager
    def compiling(self, programs: Iterable[Program]) -> Iterator[None]:
        """While the body runs, compile these beside the loading; a network is ready when its programs are."""
        try:
            with compiled_ahead(programs) as self.ahead:
                yield
        finally:
            self.ahead = {}

    @contextmanager
    def use(self, name: str, report: Report) -> Iterator[Any]:
        """The network `name`, loaded now unless it is resident.

        Raises `RunError` that names its tensors which are not finite if the body finds that what it made is not.
        """
        module = self.resident.get(name)
        if module is None:
            with report.stage(f"load {name.replace('_', ' ')}"):
                module = jax.block_until_ready(
                    load(
                        getattr(self.plan.networks, name),
                        self.plan.checkpoint.files[name],
                        placement(self.plan, name),
                        self.plan.added.get(name),
                    )
                )
        for program, compiled in self.ahead.get(name, ()):
            if not compiled.done():
                with report.stage(f"compile {program}"):
                    wait([compiled])
            compiled.result()
        if self.plan.spec.keep_resident:
            self.resident[name] = module
        try:
            yield module
        except NotFiniteError as error:
            if broken := not_finite(module):
                file, found = self.plan.checkpoint.files[name][broken[0]].file, "; ".join(some("not finite", broken))
                raise RunError(f"the {name} in {file} is damaged: {found}", "download it again") from error
            raise


def placement(plan: Plan, name: str) -> Placement:
    """Where the weights of the network `name` lie; decoders on their own mesh, or XLA would gather what they make."""
    for stage in plan.stages:
        if stage.network == name:
            return stage.sharding.place
    whole = name in ("vae", "audio_vae", "vocoder") and plan.spec.sharding.replicate_vae
    return (lambda weight: plan.decoding.whole) if whole else plan.sharding.place


def abstract_network(plan: Plan, name: str) -> Any:
    """The network `name` as it is when it is loaded, without its weights."""
    place = placement(plan, name)

    def placed(weight: Weight) -> Weight:
        value = weight.get_value()
        return weight.with_value(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=place(weight)))

    return map_weights(placed, getattr(plan.networks, name))
