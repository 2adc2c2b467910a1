"""Networks on the devices: load, keep, free."""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from itertools import chain
from operator import attrgetter
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding

from ltx2_cli.background import in_background
from ltx2_cli.core.advice import memory_for
from ltx2_cli.core.encoder_copy import text_encoder_files
from ltx2_cli.core.programs import UNDIAGNOSABLE, Program, compiling_threads
from ltx2_cli.core.report import LOAD, Report
from ltx2_cli.errors import NotFiniteError, RunError
from ltx2_cli.models.networks import DENOISER, TEXT_ENCODER
from ltx2_cli.parallel.devices import machine_memory
from ltx2_cli.parallel.mesh import ShardingPlan
from ltx2_cli.plan.inputs import STAGE2_DENOISER
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.weights.checkpoint import TensorFiles, count_and_list
from ltx2_cli.weights.declare import Weight, map_weights
from ltx2_cli.weights.load import Loading, SentChunk, merge_lora, not_finite
from ltx2_cli.weights.page_cache import cache_requests
from ltx2_cli.weights.quantized_matrix import placed
from ltx2_cli.weights.tensors import Tensor
from ltx2_cli.weights.transfer import Placement

CACHE_SHARE = 0.25  # of the machine's memory, for weights that are read before they are loaded


def network_program(plan: Plan, name: str, networks: Sequence[str], function: Any, *others: Any) -> Program:
    """A program of networks, in the order of their loading, and of other abstract arguments."""
    return Program(
        name, (*networks,), function, lambda: (*(abstract_network(plan, network) for network in networks), *others)
    )


class Components:
    """A plan's networks with their weights, by name: `with components.use("vae", report)`. There is one denoiser in
    memory: a second stage's LoRAs are merged into the first stage's weights, which are read again if needed later."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.resident: dict[str, nnx.Module] = {}
        self.kept: frozenset[str] = frozenset()
        self.loaded = set[str]()  # the names of all that were loaded
        self.compilations = defaultdict[str, list[tuple[str, Future[None]]]](list)  # of programs, by network
        self.order = list[str]()  # of all networks of the programs, that of their use
        self.requests = list[Future[None]]()  # that the system reads what is loaded next into its cache
        self.ahead: dict[str, tuple[Loading[nnx.Module], Future[deque[SentChunk]]]] = {}  # which are on their way
        self.after_load: Callable[[str], None] = lambda name: None  # is called with each network's name

    def adopt(self, plan: Plan) -> None:
        """Switch to another plan; loaded networks that are the same in it stay where they are."""
        for name in [*self.resident]:
            if _identity(self.plan, name) != _identity(plan, name):
                del self.resident[name]
        self.plan = plan

    @contextmanager
    def keeping(self, names: Collection[str]) -> Iterator[None]:
        """In the body, networks of these names stay loaded after their use."""
        before = self.kept
        self.kept = before.union(names)
        try:
            yield
        finally:
            self.keep(before)

    def keep(self, names: Collection[str]) -> None:
        """From here on, networks of these names alone stay loaded after their use."""
        self.kept = frozenset(names)
        for name in self.resident.keys() - self.kept if not self.plan.keep_resident else ():
            del self.resident[name]

    @contextmanager
    def compiling(self, programs: Iterable[Program]) -> Iterator[None]:
        """Compile programs beside the body, in their order and several at once; a network is ready when its programs
        are."""
        named = [program for program in programs if program.networks]
        threads = compiling_threads(jax.default_backend())
        compiled = in_background("compile", (program.compile for program in named), threads)
        self.order = [*dict.fromkeys(chain.from_iterable(program.networks for program in named))]
        for program, future in zip(named, compiled, strict=True):
            self.compilations[program.networks[-1]].append((program.name, future))
        try:
            yield
        finally:
            for future in compiled:
                future.cancel()
            self.compilations.clear()
            self.order = []
            self._cancel_requests()
            for loading, arriving in self.ahead.values():
                loading.cancel()
                arriving.cancel()
            self.ahead.clear()

    @contextmanager
    def use(self, name: str, report: Report) -> Iterator[Any]:
        """The network `name`, loaded unless it is resident. If the body raises `NotFiniteError` and tensors of the
        network are not finite, raises `RunError` with their names."""
        module = self.resident.get(name)
        if module is None:
            if name == DENOISER:
                self.resident.pop(STAGE2_DENOISER, None)  # subtracting what was merged would not be exact
            spoken = name.replace("_", " ")
            self._cancel_requests()  # what is loaded now comes first
            with report.activity(f"{LOAD} {spoken}"), memory_for(f"{LOAD} the {spoken}", self.plan):
                on_devices = name == STAGE2_DENOISER or name in self.ahead  # all of it, or most
                module = jax.block_until_ready(self._refiner() if name == STAGE2_DENOISER else self._loaded(name, name))
                if not on_devices:
                    report.moved(sum(array.nbytes for array in jax.tree.leaves(module)))
            self.loaded.add(name)
            self.after_load(name)
            self._request_next(name)
        for program, compiled in self.compilations.get(name, ()):
            if not compiled.done():
                with report.activity(f"compile {program}"):
                    wait([compiled])
            compiled.result()
        if self.plan.keep_resident or name in self.kept:
            self.resident[name] = module
        try:
            yield module
        except NotFiniteError as error:
            files, broken = self.plan.checkpoint.files[name], []
            with suppress(*UNDIAGNOSABLE):
                broken = [tensor for tensor in not_finite(module) if tensor in files]
            if broken:
                file, names = files[broken[0]].file, "; ".join(count_and_list({"not finite": broken}))
                raise RunError(f"the {name} in {file} is damaged: {names}", "download it again") from error
            raise

    def send_ahead(self, names: Collection[str]) -> None:
        """Send the weights of networks that the programs use next, while the devices work with another network; for
        devices with the memory for both. `use` finishes them, by programs that all hosts run in one order."""
        missing = [name for name in self.order if name in names and name not in (*self.resident, *self.ahead)]
        loadings = [self._loading(name, name) for name in missing]
        arriving = in_background("send", (loading.send_all for loading in loadings))
        self.ahead.update(zip(missing, zip(loadings, arriving, strict=True), strict=True))

    def _request_next(self, name: str) -> None:
        """While the devices work with this network, have the system read what is loaded after it."""
        later = self.order[self.order.index(name) + 1 :] if name in self.order else []
        tensors = chain.from_iterable(self._tensors(network) for network in later if network not in self.resident)
        self.requests = in_background("read", cache_requests(tensors, CACHE_SHARE * machine_memory()))

    def _cancel_requests(self) -> None:
        for request in self.requests:
            request.cancel()

    def _tensors(self, name: str) -> Iterator[Tensor]:
        """The tensors of which a host reads all to load a network, in the order of their files."""
        plan, merges = self.plan, name == STAGE2_DENOISER and not self.plan.reload_stage2
        in_parts = jax.process_count() > 1 and name in (TEXT_ENCODER, DENOISER, STAGE2_DENOISER)  # by several hosts
        if not merges and not in_parts:
            yield from sorted(self._files(name).values(), key=attrgetter("file", "begin"))
        for delta in plan.lora_deltas.get(name, {}).values():
            for lora, target, _ in delta.parts:
                yield from (lora.files[factor] for factor in (lora.pairs[target].a, lora.pairs[target].b))

    def _files(self, name: str) -> TensorFiles:
        return text_encoder_files(self.plan) if name == TEXT_ENCODER else self.plan.checkpoint.files[name]

    def _loading(self, name: str, where: str) -> Loading[Any]:
        plan = self.plan
        return Loading(plan.network(name), self._files(name), placement(plan, where), plan.lora_deltas.get(name))

    def _loaded(self, name: str, where: str) -> Any:
        if name not in self.ahead:
            loading = self._loading(name, where)
            return loading.finish(loading.send())
        loading, arriving = self.ahead.pop(name)
        return loading.finish(_emptied(arriving.result()))

    def _refiner(self) -> nnx.Module:
        """The second stage's denoiser: the first stage's with further LoRAs merged in, or loaded from files if that one
        was not run or has LoRAs of its own."""
        denoiser = self.resident.pop(DENOISER, None)
        if self.plan.reload_stage2:
            del denoiser  # the last reference: its memory is free before the refiner is loaded
            return self._loaded(STAGE2_DENOISER, STAGE2_DENOISER)
        denoiser = denoiser or self._loaded(DENOISER, STAGE2_DENOISER)
        merge_lora(denoiser, placement(self.plan, STAGE2_DENOISER), self.plan.lora_deltas[STAGE2_DENOISER])
        return denoiser


def _emptied(chunks: deque[SentChunk]) -> Iterator[SentChunk]:
    """Chunks that leave the devices' memory when they are finished."""
    while chunks:
        yield chunks.popleft()


def placement(plan: Plan, name: str) -> Placement:
    """Placement of the weights of network `name`. Replicated decoders use the decoding mesh; on the main mesh XLA would
    all-gather their results."""
    where = _where(plan, name)
    return where.place if isinstance(where, ShardingPlan) else lambda weight: where


def _where(plan: Plan, name: str) -> ShardingPlan | NamedSharding:
    for stage in plan.stages:
        if stage.network == name:
            return stage.sharding
    return plan.decoding.whole if name in plan.replicated else plan.sharding


def _identity(plan: Plan, name: str) -> tuple[object, ...]:
    """A value that is equal for two plans with the same network of this name in the same place."""
    return _where(plan, name), plan.network_values


def abstract_network(plan: Plan, name: str) -> Any:
    """The network `name` as it is when it is loaded, without its weights."""
    place = placement(plan, name)

    def at_its_place(weight: Weight) -> Weight:
        return weight.with_value(placed(weight.get_value(), place(weight)))

    return map_weights(at_its_place, plan.network(name))
