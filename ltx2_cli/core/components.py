"""The networks on the devices: each is loaded when its phase begins and, unless kept resident, dropped after it."""

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from typing import Any

import jax
from flax import nnx

from ltx2_cli.core.compiling import UNDIAGNOSABLE, CompileFutures, compile_in_background
from ltx2_cli.core.out_of_memory import LOAD, memory_for
from ltx2_cli.core.programs import Program
from ltx2_cli.core.report import Report
from ltx2_cli.errors import NotFiniteError, RunError
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import DENOISER, REFINER
from ltx2_cli.weights.checkpoint import count_and_list
from ltx2_cli.weights.declare import Weight, map_weights
from ltx2_cli.weights.load import load, merge_lora, not_finite
from ltx2_cli.weights.transfer import Placement


class Components:
    """A plan's networks with their weights, by name: `with components.use("vae", report)`.

    There is one denoiser in memory: a second stage's LoRAs are merged into the first stage's weights, which are read
    again where they are wanted after that.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.resident: dict[str, nnx.Module] = {}
        self.kept: frozenset[str] = frozenset()  # names of networks that stay once they are used
        self.ahead: CompileFutures = {}
        self.after_load: Callable[[str], None] = lambda name: None  # is called with each network's name

    @contextmanager
    def compiling(self, programs: Iterable[Program]) -> Iterator[None]:
        """While the body runs, compile these beside the loading; a network is ready when its programs are."""
        try:
            with compile_in_background(programs) as self.ahead:
                yield
        finally:
            self.ahead = {}

    @contextmanager
    def keeping(self, names: Collection[str]) -> Iterator[None]:
        """In the body these networks stay once they are used."""
        self.kept = frozenset(names)
        try:
            yield
        finally:
            for name in self.kept if not self.plan.keep_resident else ():
                self.resident.pop(name, None)
            self.kept = frozenset()

    @contextmanager
    def use(self, name: str, report: Report) -> Iterator[Any]:
        """The network `name`, loaded now unless it is resident.

        Raises `RunError` that names its tensors which are not finite if the body finds that what it made is not.
        """
        module = self.resident.get(name)
        if module is None:
            if name == DENOISER:
                self.resident.pop(REFINER, None)  # subtracting what was merged would not be exact
            spoken = name.replace("_", " ")
            with report.stage(f"load {spoken}"), memory_for(f"{LOAD}{spoken}", self.plan):
                module = jax.block_until_ready(self._refiner() if name == REFINER else self._loaded(name, name))
            self.after_load(name)
        for program, compiled in self.ahead.get(name, ()):
            if not compiled.done():
                with report.stage(f"compile {program}"):
                    wait([compiled])
            compiled.result()
        awaited = name == DENOISER and any(stage.network == REFINER for stage in self.plan.stages)
        if self.plan.keep_resident or awaited or name in self.kept:
            self.resident[name] = module
        try:
            yield module
        except NotFiniteError as error:
            files, broken = self.plan.checkpoint.files[name], []
            with suppress(*UNDIAGNOSABLE):
                broken = [tensor for tensor in not_finite(module) if tensor in files]
            if broken:
                file, found = files[broken[0]].file, "; ".join(count_and_list("not finite", broken))
                raise RunError(f"the {name} in {file} is damaged: {found}", "download it again") from error
            raise

    def _loaded(self, name: str, where: str) -> Any:
        """The network `name`, lying as the one that is called `where` does."""
        plan = self.plan
        return load(plan.network(name), plan.checkpoint.files[name], placement(plan, where), plan.added.get(name))

    def _refiner(self) -> nnx.Module:
        """The second stage's denoiser out of the first's, which is here but where that stage is left out."""
        plan, denoiser = self.plan, self.resident.pop(DENOISER, None) or self._loaded(DENOISER, REFINER)
        merge_lora(denoiser, placement(plan, REFINER), plan.added[REFINER])
        return denoiser


def placement(plan: Plan, name: str) -> Placement:
    """Where the weights of the network `name` lie; decoders on their own mesh, or XLA would gather what they make."""
    for stage in plan.stages:
        if stage.network == name:
            return stage.sharding.place
    return (lambda weight: plan.decoding.whole) if name in plan.replicated else plan.sharding.place


def abstract_network(plan: Plan, name: str) -> Any:
    """The network `name` as it is when it is loaded, without its weights."""
    place = placement(plan, name)

    def placed(weight: Weight) -> Weight:
        value = weight.get_value()
        return weight.with_value(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=place(weight)))

    return map_weights(placed, plan.network(name))
