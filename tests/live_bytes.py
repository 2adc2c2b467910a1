"""Bytes of live arrays on the devices while a run goes on: at every line of its report, and at every step."""

import gc
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax

from ltx2_cli.core.denoise_memory import decodes_beside
from ltx2_cli.core.encode import abstract_contexts
from ltx2_cli.core.report import Advance, Timings
from ltx2_cli.core.stage_programs import stage_programs
from ltx2_cli.estimate.phases import CONNECT, LOOPS, PHASES, phase_memory, phase_names, stage_of, weight_bytes
from ltx2_cli.models.networks import DENOISER
from ltx2_cli.plan.inputs import STAGE2_DENOISER
from ltx2_cli.plan.resolve import DECODERS, Plan
from ltx2_cli.plan.step_cost import text_bytes

Sample = tuple[str, int]
# The networks that may be there when one is loaded: of the same phase, or on their way to the next stage.
BESIDE = {
    "statistics": {DENOISER},
    "upsampler": {DENOISER, "statistics"},
    STAGE2_DENOISER: {DENOISER},
    **{network: {*DECODERS[:place]} for place, network in enumerate(DECODERS)},
}
WORK = ("step", "encode text", "connect text", "upsample", "decode", "write")  # the lines besides those that load
SMALL = 2**14  # bytes of hidden states, masks and latents of the tiny models


@dataclass
class LiveBytes(Timings):
    """Takes a sample when a stage begins, when it ends, and after each of its steps: what is then on the device that
    has the most. What was there before does not count."""

    samples: list[Sample] = field(default_factory=list)  # in their order: `load vae`, `end load vae`, `step`, …
    before: Counter[jax.Device] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        gc.collect()
        self.before = live_bytes()

    def sample(self, name: str) -> None:
        """Nothing is collected first: arrays must not wait on devices for Python to look for cycles."""
        size = live_bytes()
        size.subtract(self.before)
        self.samples.append((name, max(size.values(), default=0)))

    @contextmanager
    def activity(self, name: str) -> Iterator[None]:
        self.sample(name)
        with super().activity(name):
            yield
        self.sample(f"end {name}")

    @contextmanager
    def steps(self, total: int, later: float = 0, clips: int = 0, name: str = "") -> Iterator[Advance]:
        def measure(steps: int) -> None:
            advance(steps)
            self.sample("step")

        with super().steps(total, later, clips, name) as advance:
            yield measure


def live_bytes() -> Counter[jax.Device]:
    """Bytes of all arrays on each device; memory that several arrays share counts once."""
    sizes = Counter[jax.Device]()
    for (device, _), size in _buffers().items():
        sizes[device] += size
    return sizes


def _buffers() -> dict[tuple[jax.Device, int], int]:
    shards = (shard.data for array in jax.live_arrays() if not array.is_deleted() for shard in array.addressable_shards)
    return {(shard.device, shard.unsafe_buffer_pointer()): shard.nbytes for shard in shards}


def check_live_bytes(plan: Plan, samples: Sequence[Sample], kept: Collection[str] = (), paused: bool = False) -> None:
    """At each line there are the networks of its phase, those `kept` on purpose, the text, and in steps what their
    program reads; within 5 %, on the device that has the most. From the last stage on decoders may be there, where they
    fit. `paused`: clips are decoded between steps."""
    last, beside = plan.stages[-1].network, decodes_beside(plan)
    sizes, held, text = {**weight_bytes(plan), STAGE2_DENOISER: weight_bytes(plan)[DENOISER]}, set[str](), 0
    begun = sent = False
    for line, size in samples:
        ends, _, network = line.rpartition("load ")
        network = network.replace(" ", "_")
        if line.startswith("load "):
            held &= {*kept, *BESIDE.get(network, set())} - ({DENOISER} if plan.reload_stage2 else set())
        elif ends:
            held = {network, *held} - ({DENOISER} if network == STAGE2_DENOISER else set())
        elif line not in WORK:
            continue
        begun |= line == "step"
        inputs = _input_bytes(plan, STAGE2_DENOISER in held) if line == "step" or (begun and paused) else 0
        expected = sum(sizes[name] for name in held) + text + inputs
        text += _bytes(abstract_contexts(plan)) if line == "connect text" else 0
        sent |= beside and last in held
        ahead = sum(sizes.get(name, 0) for name in DECODERS if name not in held) if sent else 0
        least = 0 if line == "write" else expected  # a segment's decoders may have left
        tolerance = 0.05 * expected + SMALL
        assert least - tolerance <= size <= expected + ahead + tolerance, (line, size, expected, held, ahead)


def check_phases(plan: Plan, samples: Sequence[Sample]) -> None:
    """The most of each phase is what the plan says of its weights, with the contexts of the text once they are made, in
    steps also with its features, keys and values; within 5 %. The connectors have the text encoder's result, which the
    plan counts among activations."""
    names = phase_names(plan)
    memory, most, name = phase_memory(plan, names), dict.fromkeys(names, 0), names[0]
    phase_of = {network: name for name in reversed(names) for network in PHASES[name]}  # that loads it
    for line, size in samples:
        if line.startswith("load "):
            name = phase_of[line.removeprefix("load ").replace(" ", "_")]
        elif line in WORK:
            most[name] = max(most[name], size)
    contexts, sizes, last = 0, weight_bytes(plan), [name for name in names if name in LOOPS][-1]
    for name, (weights, _, activations) in memory.items():
        expected = weights + contexts
        if name in LOOPS:
            sharding = stage_of(plan, name).sharding
            expected += text_bytes(plan.spec, plan.arch.transformer, len(plan.prompts), sharding)
        surplus = activations if name == CONNECT else 0
        if name == last:  # where they fit, decoders are on their way
            surplus += sum(sizes[decoder] for decoder in DECODERS if decoder in sizes) if decodes_beside(plan) else 0
        assert 0.95 * expected <= most[name] <= 1.05 * expected + surplus, (name, most[name], expected)
        contexts += _bytes(abstract_contexts(plan)) if name == CONNECT else 0


def _input_bytes(plan: Plan, refines: bool) -> int:
    """Of each device, what the program of a stage's steps reads besides the denoiser."""
    _, *inputs = stage_programs(plan, len(plan.stages) - 1 if refines else 0).steps.arguments()
    return _bytes(inputs)


def _bytes(arrays: Any) -> int:
    """Bytes of abstract arrays on each device; one that is not laid out is whole."""
    size = 0
    for array in jax.tree.leaves(arrays):
        shape = array.sharding.shard_shape(array.shape) if array.sharding else array.shape
        size += math.prod(shape) * array.dtype.itemsize
    return size
