"""The nearest request that fits where one does not: the same clip in another way, else a smaller clip, else the demo.

Every alternative is planned before it is suggested.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import islice, product
from math import prod

from ltx2_cli.errors import UsageError
from ltx2_cli.estimate.meshes import mesh_specs
from ltx2_cli.estimate.offline import declare_offline, plan_offline
from ltx2_cli.estimate.phases import PhaseMemory
from ltx2_cli.estimate.requests import Alternative, Request, available_memory, setting
from ltx2_cli.plan.recipe import ONE_STAGE, TWO_STAGE
from ltx2_cli.plan.resolve import Declared, Plan, build_plan
from ltx2_cli.request.profiles import AUTO, RECIPE_KEYS, read_spec
from ltx2_cli.request.spec import DType, RunSpec, ShardingSpec
from ltx2_cli.sharding import divisors

FRACTION = 0.95  # of a GPU's memory that jax may well take
USUAL_TEXT = 1024  # tokens that a prompt is cut to
SHARES = tuple(Fraction(quarters, 4) for quarters in (4, 3, 2, 1))  # of each side of a clip
MUCH_LARGER = 1.5  # times as many pixels
MOST_MESHES = 12  # under which a smaller clip is tried
DEMO = "demo"
# fields of the spec that change no network
SAME_NETWORKS = frozenset(
    ("height", "width", "num_frames", "num_videos", "max_sequence_length", "sharding", "keep_resident", "vae_memory_gb")
)


@dataclass(frozen=True)
class Suggestions:
    """The search for the nearest request that fits, around one whose plan does not."""

    request: Request
    plan: Plan

    @property
    def spec(self) -> RunSpec:
        """What does not fit."""
        return self.plan.spec

    @cached_property
    def declared(self) -> Declared:
        """The networks of the plan."""
        return declare_offline(self.spec, self.plan.checkpoint, self.request.source)

    def nearest(self) -> Alternative | None:
        """What fits and differs least; None if nothing fits."""
        same = next(filter(self.suits, self.same_clip()), None)
        return same or self.smaller_clip() or next(filter(self.suits, self.other_networks()), None)

    def suits(self, alternative: Alternative) -> bool:
        """Whether it can be typed, can be met, and fits."""
        return self.fits(alternative, lambda phase: phase.peak)

    def fits(self, alternative: Alternative, needed: Callable[[PhaseMemory], int]) -> bool:
        """Whether it can be typed and met, and what is `needed` in each phase fits."""
        if any(map(self.request.fixed, alternative.options)):
            return False
        try:
            plan = self.altered(alternative)
        except UsageError:
            return False
        available = available_memory(plan)
        most = FRACTION * available.total if alternative.most_memory else available.limit
        return max(map(needed, self.request.memory(plan).values())) <= most

    def altered(self, alternative: Alternative) -> Plan:
        """The plan of an alternative. Raises `UsageError` where it cannot be met."""
        spec, devices, source = replace(self.spec, **alternative.values), self.request.devices, self.request.source
        if alternative.values.keys() <= SAME_NETWORKS:
            return self.request.until_end(build_plan(self.declared, spec, devices, source))
        return self.request.until_end(plan_offline(spec, devices, source))

    @cached_property
    def free(self) -> list[Alternative]:
        """Settings that change nothing in the clip, each by itself."""
        spec, found = self.spec, []
        available = available_memory(self.plan)
        if FRACTION * available.total > available.limit:
            found.append(Alternative(most_memory=True))
        if spec.keep_resident:
            found.append(setting(keep_resident=False))
        if spec.vae_memory_gb is not None:
            found.append(setting(vae_memory_gb=None))
        return found

    @cached_property
    def costly(self) -> list[Alternative]:
        """Settings that change a clip in its last bits, or cut a very long prompt; each by itself."""
        wide = [key for key in ("text_encoder_dtype", "dtype") if vars(self.spec)[key] is DType.float32]
        long = self.spec.max_sequence_length > USUAL_TEXT
        return [
            *(setting(**{key: DType.bfloat16}) for key in wide),
            *([setting(max_sequence_length=USUAL_TEXT)] if long else []),
        ]

    @cached_property
    def starts(self) -> list[Alternative]:
        """The request, with all free settings, and with the costly ones too; each once."""
        starts = [Alternative()]
        starts += [starts[-1].also(*self.free)] if self.free else []
        return [*starts, starts[-1].also(*self.costly)] if self.costly else starts

    def same_clip(self) -> Iterator[Alternative]:
        """Other ways to the same clip, those that change the least first."""
        yield from self.free
        yield from self.meshes(Alternative())
        yield from self.costly
        for start in self.starts[1:]:
            yield start
            yield from self.meshes(start)

    def meshes(self, start: Alternative) -> Iterator[Alternative]:
        """`start` on other meshes of the devices: that of their own profile for a plan on one of them, else meshes of
        the plan's axes."""
        sharding, devices = self.spec.sharding, len(self.request.devices)
        if not sharding.mesh and devices > 1:
            yield start.also(Alternative({"sharding": replace(sharding, profile=AUTO)}, {"sharding": AUTO}))
        for spec in (*_split_more(sharding, devices), *mesh_specs(self.plan, devices)):
            options = {f"sharding.mesh.{axis}": str(size) for axis, size in spec.mesh.items()}
            asked = {f"sharding.mesh.{axis}": str(size) for axis, size in sharding.mesh.items()}
            yield start.also(Alternative({"sharding": spec}, dict(options.items() - asked.items())))

    def smaller_clip(self) -> Alternative | None:
        """The largest clip that fits: with fewer videos at once, fewer frames, or a smaller picture. Settings are
        changed too where the clip is much larger for it, or none fits otherwise."""
        found: Alternative | None = None
        for start in self.starts:
            largest = max(self.smaller(start), key=self.volume, default=None)
            if largest and (found is None or self.volume(largest) > MUCH_LARGER * self.volume(found)):
                found = largest
        if found:
            return found
        meshes = islice(self.meshes(self.starts[-1]), MOST_MESHES)
        smaller = next(filter(None, (list(self.smaller(mesh)) for mesh in meshes)), [])
        return max(smaller, key=self.volume, default=None)

    def smaller(self, start: Alternative) -> Iterator[Alternative]:
        """Smaller clips that fit, each the largest of its kind; none where the weights alone do not fit."""
        if not self.fits(start, lambda phase: max(phase.loading, phase.weights)):
            return
        if self.spec.num_videos > 1:
            videos = _largest(self.spec.num_videos, lambda number: self.suits(start.also(setting(num_videos=number))))
            if videos:
                yield start.also(setting(num_videos=videos))
                return
            start = start.also(setting(num_videos=1))
        for share in SHARES:
            picture = start if share == 1 else start.also(self.picture(share))
            if share < 1 and self.suits(picture):
                yield picture
                return
            if frames := self.most_frames(picture):
                yield picture.also(setting(num_frames=frames))

    def most_frames(self, start: Alternative) -> int:
        """The most frames below those that are asked with which `start` fits; 0 if it never does."""
        unit, _ = self.units
        longest = (self.spec.num_frames - 1) // unit
        units = _largest(longest, lambda units: self.suits(start.also(setting(num_frames=units * unit + 1))))
        return units * unit + 1 if units else 0

    def picture(self, share: Fraction) -> Alternative:
        """A smaller picture of the same form, as nearly as its sides can have it."""
        _, unit = self.units
        sides = {"width": self.spec.width, "height": self.spec.height}
        return setting(**{side: max(unit, round(length * share / unit) * unit) for side, length in sides.items()})

    @cached_property
    def units(self) -> tuple[int, int]:
        """Steps of frames and of pixels between clips that can be made, also where a second stage upsamples them."""
        first, last, scale = self.plan.stages[0].geometry, self.plan.stages[-1].geometry, self.plan.arch.compression
        along_time = Fraction(max(last.frames - 1, 1), max(first.frames - 1, 1)).numerator
        return scale.frames * along_time, scale.pixels * Fraction(last.height, first.height).numerator

    def volume(self, alternative: Alternative) -> int:
        """Pixels of all its videos."""
        spec = replace(self.spec, **alternative.values)
        return spec.num_videos * spec.num_frames * spec.height * spec.width

    def other_networks(self) -> Iterator[Alternative]:
        """Without a second stage; then the embedded model."""
        spec = self.request.spec
        if spec.recipe == TWO_STAGE:
            left_open = {key: vars(spec)[key] for key in RECIPE_KEYS}
            yield Alternative({**left_open, "recipe": ONE_STAGE}, {"recipe": ONE_STAGE})
        if spec.model != DEMO:
            yield Alternative(vars(read_spec(prompt=spec.prompt, model=DEMO)), {"model": DEMO}, anew=True)


def _split_more(sharding: ShardingSpec, devices: int) -> Iterator[ShardingSpec]:
    """The profile with its weights split otherwise over so many devices, in fewer parts first. The other axes stay, of
    which one takes the devices that are left."""
    axes = [axis for axis in dict.fromkeys(sharding.weights.values()) if sharding.mesh.get(axis, -1) != -1]
    choices = product(divisors(devices), repeat=len(axes)) if -1 in sharding.mesh.values() else ()
    for sizes in sorted(choices, key=lambda sizes: (prod(sizes), sizes[::-1])):
        yield replace(sharding, mesh={**sharding.mesh, **dict(zip(axes, sizes, strict=True))})


def _largest(count: int, suits: Callable[[int], bool]) -> int:
    """The largest number from 1 to below `count` that suits; 0 if none does. All below one that suits do."""
    below, above = 0, count
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if suits(middle) else (below, middle)
    return below
