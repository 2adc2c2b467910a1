"""Requests against the memory of their devices, and the search for the nearest one that fits: the same clip in another
way, else a smaller clip, else the demo. Every alternative is planned before it is suggested."""

import json
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, reduce
from itertools import chain, islice, product
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import jax

from ltx2_cli.artifacts.outputs import Product
from ltx2_cli.errors import UsageError
from ltx2_cli.estimate.offline import mesh_specs
from ltx2_cli.estimate.phases import PhaseMemory, offloaded_bytes, phase_memory, phase_names
from ltx2_cli.models.networks import MATRIX_TYPES
from ltx2_cli.parallel.devices import (
    RESERVE,
    DeviceMemory,
    device_memory,
    host_memory,
)
from ltx2_cli.parallel.mesh import divisors
from ltx2_cli.plan.edit import fewest_shown, keeps_frames
from ltx2_cli.plan.recipe import HQ, ONE_STAGE, TWO_STAGE, complete_request
from ltx2_cli.plan.resolve import Plan, build_plan, plan_offline, resolve, stage1_plan
from ltx2_cli.plan.stages import InitialLatents
from ltx2_cli.plan.windows import fewest_windows
from ltx2_cli.request.profiles import AUTO, RECIPE_KEYS, read_spec
from ltx2_cli.request.size import SIDES, longest_clip
from ltx2_cli.request.spec import DType, Offload, RunSpec, WeightType
from ltx2_cli.request.validation import MAX_WINDOWS, spec_problems
from ltx2_cli.weights.published import NETWORKS

FRACTION = 0.95  # of a GPU's memory that jax may well take
PROGRAM_FRACTION = FRACTION * (1 - RESERVE)  # of it for a program then
USUAL_TEXT = 1024  # tokens that a prompt is cut to
SIDE_SCALES = tuple(Fraction(quarters, 4) for quarters in (4, 3, 2, 1))  # of each side of a clip
MUCH_LARGER = 1.5  # times as many pixels
MOST_MESHES = 12  # tried with a smaller clip
MOST_WINDOWS = 8  # tried, from the fewest
DEMO = "demo"
# fields of the spec that change no network
SAME_NETWORKS = frozenset(
    (
        *("height", "width", "num_frames", "windows", "num_videos", "max_sequence_length"),
        *("sharding", "keep_resident", "vae_memory_gb", "offload"),
        "conditions",  # of which alternatives change the frames that are seen
        "second_stage",  # of which they change the number of tiles
    )
)


class Alternative(NamedTuple):
    """A change of a request: values of the spec by field, and the text to type for them by dotted key."""

    values: Mapping[str, Any] = {}
    options: Mapping[str, str] = {}
    most_memory: bool = False  # jax is to take most of a GPU's memory
    standalone: bool = False  # a command of its own, without the words of the request

    def also(self, other: "Alternative") -> "Alternative":
        """Both changes together."""
        values, options = {**self.values, **other.values}, {**self.options, **other.options}
        return Alternative(values, options, self.most_memory or other.most_memory)


def setting(**values: str | int | None) -> Alternative:
    """An alternative of other values of the spec, typed as they are."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return Alternative(values, texts)


def available_memory(plan: Plan) -> DeviceMemory:
    """The memory of each device of a plan."""
    return device_memory(list(plan.sharding.mesh.devices.flat))


@dataclass(frozen=True)
class Request:
    """A request, its devices, and the phases that the command runs."""

    spec: RunSpec  # recipe and devices may have left values open
    devices: Sequence[jax.Device]
    source: InitialLatents | None = None  # latents that the run goes on from
    product: Product = Product.clips
    skipped: frozenset[str] = frozenset()  # phases that the command does not run
    networks: Collection[str] = NETWORKS  # of a checkpoint, those whose weights the command reads or depends on
    fixed: Callable[[str], bool] = frozenset[str]().__contains__  # dotted keys that it cannot change
    on_slice: bool = False  # the devices are those of a described TPU slice or host: another may be named
    corrections: Mapping[str, float] = field(default_factory=dict)  # compiled activations by phase, in estimates
    deep: bool = False  # frames are of 16 bits

    def plan(self) -> Plan:
        """The plan by configs alone. Raises `UsageError` if the request cannot be run."""
        return self.until_end(plan_offline(self.spec, self.devices, self.source, self.networks))

    def resolved(self) -> Plan:
        """The plan by the networks' files, after their download. Raises `UsageError` if the request cannot be run."""
        return self.until_end(resolve(self.spec, self.source, self.networks))

    def until_end(self, plan: Plan) -> Plan:
        """The part of a plan that the command runs, with frames as it wants them."""
        if self.deep:
            size = plan.num_frames, plan.spec.height, plan.spec.width
            plan = replace(plan, decoding=plan.decoding.deep(*size))
        return stage1_plan(plan) if self.product is Product.drafts else plan

    def memory(self, plan: Plan) -> dict[str, PhaseMemory]:
        """Memory of each phase of a plan of this request on a device."""
        phases = [phase for phase in phase_names(plan, self.product) if phase not in self.skipped]
        return {
            phase: memory._replace(activations=round(memory.activations * self.corrections.get(phase, 1)))
            for phase, memory in phase_memory(plan, phases).items()
        }

    def host_shortage(self, plan: Plan) -> tuple[int, int] | None:
        """Bytes of the host's memory that a plan of this request needs for each device, and those that it has, if these
        are fewer."""
        if plan.spec.offload is Offload.none:
            return None
        phases = [phase for phase in phase_names(plan, self.product) if phase not in self.skipped]
        needed, has = offloaded_bytes(plan, phases), host_memory(list(plan.sharding.mesh.devices.flat))
        return (needed, int(has)) if needed > has else None


@dataclass(frozen=True)
class Suggestions:
    """The search for the nearest request that fits, around one whose plan does not."""

    request: Request
    plan: Plan

    def nearest(self) -> Alternative | None:
        """The alternative that fits and differs least; None if nothing fits."""
        same = next(filter(self.fits, chain(self.same_clip(), self.in_windows(), self.in_tiles())), None)
        return same or self.smaller_clip() or next(filter(self.fits, self.other_networks()), None)

    def with_fewer_bytes_to_copy(self, nearest: Alternative) -> Iterator[Alternative]:
        """Where `nearest` leaves layers on the host, to be copied in each step: the nearest alternative with narrower
        matrices, then the nearest one in int4 that leaves none there."""
        if nearest.values.get("offload", Offload.none) is Offload.none:
            return
        if "weights" not in nearest.values:
            narrow = (other for other in self.same_clip() if "weights" in other.values)
            yield from islice(filter(self.fits, narrow), 1)
        resident = (other for other in self.in_four_bits() if "offload" not in other.values)
        yield from islice(filter(self.fits, resident), 1)

    def fits(self, alternative: Alternative, needed: Callable[[PhaseMemory], int] = attrgetter("peak")) -> bool:
        """Whether an alternative can be typed and run, and fits in each phase that is `needed`."""
        if any(map(self.request.fixed, alternative.options)):
            return False
        if not alternative.values.keys().isdisjoint(SIDES) and keeps_frames(self.plan.spec, self.plan.input_videos):
            return False
        try:
            plan = self.altered(alternative)
        except UsageError:
            return False
        available = available_memory(plan)
        most = PROGRAM_FRACTION * available.total if alternative.most_memory else available.limit
        on_devices = max(map(needed, self.request.memory(plan).values())) <= most
        return on_devices and not self.request.host_shortage(plan)

    def altered(self, alternative: Alternative) -> Plan:
        """The plan of an alternative. Raises `UsageError` if it cannot be run."""
        request = replace(self.request, spec=replace(self.plan.spec, **alternative.values))
        if alternative.values.keys() <= SAME_NETWORKS:
            spec = complete_request(request.spec, self.plan.checkpoint, request.devices, request.source is not None)
            return request.until_end(build_plan(self.plan, spec, request.devices, request.source))
        return request.plan()

    @cached_property
    def settings(self) -> tuple[list[Alternative], list[Alternative]]:
        """Settings that change nothing in the clip, and those that change its last bits or cut a very long prompt."""
        available, spec = available_memory(self.plan), self.plan.spec
        free = [Alternative(most_memory=True)] if PROGRAM_FRACTION * available.total > available.limit else []
        free += [setting(keep_resident=False)] if spec.keep_resident else []
        free += [setting(vae_memory_gb=None)] if spec.vae_memory_gb is not None else []
        wide = [key for key in ("text_encoder_dtype", "dtype") if vars(spec)[key] is DType.float32]
        costly = [setting(**{key: DType.bfloat16}) for key in wide]
        costly += [setting(max_sequence_length=USUAL_TEXT)] if spec.max_sequence_length > USUAL_TEXT else []
        if spec.weights not in MATRIX_TYPES:  # int8 is more exact than fp8
            half = setting(dtype=DType.bfloat16) if spec.dtype is DType.float32 else Alternative()
            costly.append(half.also(setting(weights=WeightType.int8)))
        return free, costly

    @cached_property
    def starts(self) -> list[Alternative]:
        """The request as it is, with all free settings, and with the costly ones too; without duplicates."""
        starts = [Alternative()]
        for settings in filter(None, self.settings):
            starts.append(reduce(Alternative.also, settings, starts[-1]))
        return starts

    def left_open(self) -> Iterator[Alternative]:
        """Alternatives that the request leaves to the devices: other meshes, then matrices of int8 in each mesh."""
        asked = self.request.spec
        if asked.sharding.profile != AUTO:
            return
        yield from self.meshes(Alternative())
        wide = self.plan.checkpoint.matrices(self.plan.spec).transformer is None
        if wide and asked.weights is WeightType.auto and asked.dtype is not DType.float32:
            eight_bits = setting(weights=WeightType.int8).also(Alternative({"compute": asked.compute}))
            yield eight_bits
            yield from self.meshes(eight_bits)

    def same_clip(self) -> Iterator[Alternative]:
        """Alternatives for the same clip, the smallest changes first."""
        free, costly = self.settings
        kinds = list(Offload)
        asked = kinds.index(self.plan.spec.offload)
        yield from (setting(offload=kind) for kind in kinds[:asked])  # the host may lack the memory for more
        yield from free
        yield from self.meshes(Alternative())
        yield from costly
        for start in self.starts[1:]:
            yield start
            yield from self.meshes(start)
        yield from self.on_host()  # slower than all others
        yield from self.in_four_bits()

    def on_host(self) -> Iterator[Alternative]:
        """Alternatives for the same clip with more of the networks on the host, the smallest changes first."""
        spec, kinds = self.plan.spec, list(Offload)
        if spec.scan_layers:
            starts = (Alternative(), *self.settings[1], *self.starts[1:])
            for start, kind in product(starts, kinds[kinds.index(spec.offload) + 1 :]):
                yield start.also(setting(offload=kind))

    def in_four_bits(self) -> Iterator[Alternative]:
        """Alternatives for the same clip with matrices of int4, the smallest changes first."""
        spec = self.plan.spec
        # Not on a CPU: a clip takes hours, and by XLA up to a fifth more memory than is estimated.
        if spec.weights is not WeightType.int4 and self.plan.sharding.mesh.devices.flat[0].platform != "cpu":
            for start, kind in product(self.starts, Offload if spec.scan_layers else (spec.offload,)):
                four_bits = start.also(setting(weights=WeightType.int4))
                yield four_bits if kind is spec.offload else four_bits.also(setting(offload=kind))

    def in_windows(self) -> Iterator[Alternative]:
        """The same clip in windows, where it is longer than the training clips; the fewest first."""
        spec, longest = self.plan.spec, longest_clip(self.plan.spec.fps)
        if spec.num_frames <= longest:
            return
        fewest = fewest_windows(spec, self.plan.stages[-1].geometry, longest) or MAX_WINDOWS
        for start, count in product(self.starts, range(max(fewest, spec.windows + 1), fewest + MOST_WINDOWS)):
            if not any(spec_problems(replace(spec, windows=count))):
                yield start.also(setting(windows=count))

    def in_tiles(self) -> Iterator[Alternative]:
        """The same clip in more tiles along time, where keyframes end its segments; the fewest first."""
        stage, second = self.plan.stages[-1], self.plan.spec.second_stage
        if not stage.holds_keyframes:
            return
        segments = stage.source_keyframes
        counts = sorted({-(-segments // of_a_tile) for of_a_tile in range(1, segments)})
        for start, count in product(self.starts, counts):
            if count <= (second.temporal_tiles or 1):
                continue
            more = {"second_stage": replace(second, temporal_tiles=count)}
            yield start.also(Alternative(more, {"second_stage.temporal_tiles": str(count)}))

    def meshes(self, start: Alternative) -> Iterator[Alternative]:
        """`start` on other meshes: the devices' own profile for a plan on a single device, else meshes of the plan's
        axes."""
        sharding, devices = self.plan.spec.sharding, len(self.request.devices)
        if not sharding.mesh and devices > 1:
            yield start.also(Alternative({"sharding": replace(sharding, profile=AUTO)}, {"sharding": AUTO}))
        # Its weights split otherwise, in fewer parts first; another axis takes the devices that are left.
        axes = [axis for axis in dict.fromkeys(sharding.weights.values()) if sharding.mesh.get(axis, -1) != -1]
        choices = product(divisors(devices), repeat=len(axes)) if -1 in sharding.mesh.values() else ()
        sizes = sorted(choices, key=lambda sizes: (prod(sizes), sizes[::-1]))
        split = [replace(sharding, mesh={**sharding.mesh, **dict(zip(axes, parts, strict=True))}) for parts in sizes]
        for spec in (*split, *mesh_specs(self.plan, devices)):
            changed = {axis: str(size) for axis, size in spec.mesh.items() if size != sharding.mesh.get(axis)}
            options = {f"sharding.mesh.{axis}": size for axis, size in changed.items()}
            yield start.also(Alternative({"sharding": spec}, options))

    def smaller_clip(self) -> Alternative | None:
        """The largest clip that fits: fewer videos at once, fewer frames, or a smaller size; with other settings
        where that makes it much larger, or nothing fits otherwise."""
        best: Alternative | None = None
        for start in self.starts:
            largest = max(self.smaller(start), key=self.volume, default=None)
            if largest and (best is None or self.volume(largest) > MUCH_LARGER * self.volume(best)):
                best = largest
        if best:
            return best
        others = chain(islice(self.meshes(self.starts[-1]), MOST_MESHES), self.on_host(), self.in_four_bits())
        smaller = next(filter(None, (list(self.smaller(start)) for start in others)), [])
        return max(smaller, key=self.volume, default=None)

    def smaller(self, start: Alternative) -> Iterator[Alternative]:
        """Smaller clips that fit, each the largest of its kind; none where the weights alone do not fit."""
        if not self.fits(start, lambda phase: max(phase.loading, phase.weights)):
            return
        spec, (frames, pixels), shortest = self.plan.spec, self.units, fewest_shown(self.plan.spec)
        if spec.num_videos > 1:
            if fewer := self.largest(start, "num_videos", range(1, spec.num_videos)):
                yield fewer
                return
            start = start.also(setting(num_videos=1))
        for scale in SIDE_SCALES:
            # frames of the same form, as nearly as their sides allow
            sides = {side: round(vars(spec)[side] * scale / pixels) for side in ("width", "height")}
            smaller = setting(**{side: max(1, count) * pixels for side, count in sides.items()})
            resized = start.also(smaller) if scale < 1 else start
            if scale < 1 and self.fits(resized):
                yield resized
                return
            if shorter := self.largest(resized, "num_frames", range(shortest, spec.num_frames - frames + 1, frames)):
                yield shorter

    def largest(self, start: Alternative, key: str, numbers: range) -> Alternative | None:
        """`start` with the largest of `numbers` that fits; None if none does. Of those that the request may have, all
        below one that fits do."""
        choices = [start.also(setting(**{key: number})) for number in numbers]
        if key == "num_frames":  # which decides how much is seen of an edited clip
            unread = (
                replace(each, num_frames=None) if each.kind == "clip" else each for each in self.plan.spec.conditions
            )
            conditions = Alternative({"conditions": tuple(unread)})
            choices = [choice.also(conditions) for choice in choices]
        legal = [choice for choice in choices if not any(spec_problems(replace(self.plan.spec, **choice.values)))]
        count = bisect_left(legal, True, key=lambda choice: not self.fits(choice))
        return legal[count - 1] if count else None

    @cached_property
    def units(self) -> tuple[int, int]:
        """Multiples of frames and pixels of clips that can be made, also with a second stage."""
        first, last, scale = self.plan.stages[0].geometry, self.plan.stages[-1].geometry, self.plan.arch.compression
        along_time = Fraction(max(last.frames - 1, 1), max(first.frames - 1, 1)).numerator
        return scale.frames * along_time, scale.pixels * Fraction(last.height, first.height).numerator

    def volume(self, alternative: Alternative) -> int:
        """Pixels of all its videos."""
        spec = replace(self.plan.spec, **alternative.values)
        return spec.num_videos * spec.num_frames * spec.height * spec.width

    def other_networks(self) -> Iterator[Alternative]:
        """Alternatives with fewer networks: no second stage, then the demo."""
        spec = self.request.spec
        if spec.recipe in (TWO_STAGE, HQ):
            left_open = {key: vars(spec)[key] for key in RECIPE_KEYS}
            yield Alternative({**left_open, "recipe": ONE_STAGE}, {"recipe": ONE_STAGE})
        if spec.model != DEMO:
            yield Alternative(vars(read_spec(prompt=spec.prompt, model=DEMO)), {"model": DEMO}, standalone=True)
