"""A stage's compiled programs, their inputs, and the stage with its denoiser on the devices."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ltx2_cli.core.components import abstract_network
from ltx2_cli.core.encode import abstract_contexts
from ltx2_cli.core.programs import Program, as_abstract
from ltx2_cli.diffusion.conditions import Conditions, ConditionTokens, merge_conditions
from ltx2_cli.diffusion.denoise import (
    GuidanceWeights,
    Pass,
    StepCache,
    StepPasses,
    WholeStep,
    denoise,
    denoise_with_cache,
    pad_steps,
    traced_weights,
)
from ltx2_cli.diffusion.latents import LatentShape, noise, noise_behind, to_tokens
from ltx2_cli.diffusion.sampler import Sampler, find_sampler
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.models.transformer_inputs import (
    DenoiserInputs,
    LayerCache,
    PassMasks,
    PassReuse,
    Ropes,
    TextContext,
    rope_tables,
)
from ltx2_cli.nn.attention import NormalizedGuidance
from ltx2_cli.parallel.arrays import to_devices
from ltx2_cli.parallel.jit import jitted
from ltx2_cli.plan.phases import Denoise
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.segments import segment_weights
from ltx2_cli.plan.stage_tiles import StageTiles, Tile
from ltx2_cli.plan.stages import NO_CONDITIONS, Stage
from ltx2_cli.request.spec import RunSpec, Streams

NO_CONDITION_LATENTS: Streams[Sequence[np.ndarray]] = Streams((), ())
KEYS_VALUES = (None, None, None, "heads")  # the logical axes of a text context's keys and values


class StagePrograms(NamedTuple):
    """The programs of a stage. Each of the two stages draws its own noise."""

    noise: Program  # seeds uint32 [videos] to tokens of standard normal noise
    text: Program  # connectors' output to the layers' text, once for all steps
    cache: Program | None  # the cache before the first step; None: no step skips layers
    steps: Program  # latents, inputs, schedule, seeds, two bounds and any cache to latents, whether finite, the cache
    forward: Program  # the loop's evaluation in a step: one forward over all rows. Only estimates compile it


def stage_programs(plan: Plan, number: int, window: int | None = None) -> StagePrograms:
    """The programs of the plan's stage `number`, for a window of it, or for the one with the most latents."""
    clip, arch = plan.stages[number], plan.arch.transformer
    stage = clip.largest_window if window is None else clip.window(window)
    sharding, whole = stage.sharding, stage.sharding.replicated
    suffix = f" {number + 1}" if len(plan.stages) > 1 else ""
    suffix += f" of {stage.geometry.video_tokens} tokens" if clip.between_keyframes else ""
    split = NamedSharding(sharding.mesh, sharding.activation(KEYS_VALUES, (1, 1, 1, arch.num_attention_heads)))
    text_shardings: tuple[Any, Any] = (whole, split)
    seeds = jax.ShapeDtypeStruct((plan.batch_size,), np.uint32)
    step, sigma = jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((), np.float32)
    schedule = as_abstract(_stage_schedule(stage), whole)

    def text_arguments() -> tuple[Any, ...]:
        return abstract_network(plan, stage.network), as_abstract(abstract_contexts(plan), whole)

    def inputs() -> tuple[Any, ...]:
        rows = as_abstract(_stage_rows(plan, stage, _no_latents(plan, stage)), whole)
        return abstract_network(plan, stage.network), noise.outputs(), DenoiserInputs(text.outputs(), *rows)

    behind = stage.geometry.video_tokens - stage.geometry.grid_tokens
    sizes_of_noise = {"shapes": stage.shapes, "stage": int(stage.source is not None), "behind": behind}
    draw = jitted(_noise, whole, **sizes_of_noise)
    read = jitted(Transformer.text_context, TextContext(*text_shardings), sharding)
    noise = Program(f"noise{suffix}", (), draw, lambda: (seeds,), number)
    text = Program(f"text context{suffix}", (stage.network,), read, text_arguments, number)
    # The forward is for estimates: the number of turns of a loop is in its HLO only where the bounds are constant.
    branch = min(stage.stg_blocks) if Pass.PERTURBED in stage.passes else None
    sizes = plan.batch_size, stage.shapes, behind
    ways = {"choices": tuple(stage.pass_counts), "sampler": find_sampler(stage.sampler), "tiles": stage.tiles}
    loop = jitted(_denoise_steps, whole, sharding, ("latents",), sizes=sizes, **ways, **sizes_of_noise)
    cache = None
    if stage.first_block_cache is not None:
        shapes = jitted(_empty_cache, None, sharding, sizes=sizes).eval_shape(*inputs())
        placed = _cache_shardings(shapes, stage)
        empty = jitted(_empty_cache, placed, sharding, sizes=sizes)
        cache = Program(f"cache{suffix}", (stage.network,), empty, inputs, number)
        results, donated = (whole, whole, placed), ("latents", "cache")
        loop = jitted(_denoise_steps, results, sharding, donated, sizes=sizes, **ways, **sizes_of_noise)

    velocity = jitted(
        _velocity, None, sharding, sizes=sizes, branch=branch, tile=stage.tiles and stage.tiles.tiles()[-1]
    )

    def arguments() -> tuple[Any, ...]:
        return *inputs(), *schedule, seeds, step, step, *((cache.outputs(), sigma) if cache else ())

    steps = Program(f"denoise{suffix}", (stage.network,), loop, arguments, number)
    forward = Program("forward", (stage.network,), velocity, lambda: (*inputs(), sigma), number)
    return StagePrograms(noise, text, cache, steps, forward)


def _cache_shardings(shapes: StepCache, stage: Stage) -> Any:
    """Where the cache of steps lies: its tokens as between layers, all else whole."""
    sharding, axes = stage.sharding, ("tokens", "audio_tokens")

    def split(x: jax.ShapeDtypeStruct, axis: str) -> NamedSharding:
        return NamedSharding(sharding.mesh, sharding.activation(("rows", axis, None), x.shape))

    whole: Any = jax.tree.map(lambda _: sharding.replicated, shapes)
    first = split(shapes.layers.first, axes[0 if shapes.layers.others.video.shape[-1] else 1])
    others = Streams(*map(split, shapes.layers.others, axes))
    return whole._replace(layers=whole.layers._replace(first=first, others=others))


def _empty_cache(transformer: Transformer, latents: Streams[jax.Array], inputs: DenoiserInputs) -> StepCache:
    videos = len(latents.video)
    none = jnp.zeros(videos, jnp.int32)
    whole = WholeStep(Streams(*map(jnp.zeros_like, latents)), jnp.int32(0), none)
    return StepCache(transformer.empty_cache(latents, inputs), whole, none)


def _stage_rows(
    plan: Plan, stage: Stage, condition_latents: Streams[Sequence[np.ndarray]]
) -> tuple[
    np.ndarray,
    Streams[Ropes],
    PassMasks,
    Streams[Conditions | None],
    PassReuse,
    np.ndarray | None,
    NormalizedGuidance | None,
    Streams[np.ndarray] | None,
]:
    """The fields of `DenoiserInputs` but the text, on the host."""
    videos, passes = plan.batch_size, stage.passes
    branch: np.ndarray | None = None
    self_attention = np.ones((plan.arch.transformer.num_layers, len(passes)), bool)
    if Pass.PERTURBED in passes:
        self_attention[list(stage.stg_blocks), passes.index(Pass.PERTURBED)] = False
        first = min(stage.stg_blocks)
        if first or stage.first_block_cache is None:  # a cache needs the first block of all passes
            branch = np.asarray(first, np.int32)
    cross_modal = np.array([guidance_pass is not Pass.ISOLATED for guidance_pass in passes])
    masks = PassMasks(np.tile(self_attention, videos), np.tile(cross_modal, videos))
    texts = [[plan.prompts.index(text) for text in own] for own in plan.texts]
    negative = [len(plan.prompts) - 1] * len(texts[0])
    contexts = [negative if each is Pass.UNCOND else own for own in texts for each in passes]
    seen = stage.tiles.in_space(stage.geometry) if stage.tiles else stage.geometry
    segments = segment_weights(plan.spec, seen)
    tokens, tables = _conditions(stage, condition_latents), rope_tables(seen, plan.arch.transformer)
    which, reuse = np.asarray(contexts, np.int32), PassReuse(passes, branch)
    marked = seen.single_frames if stage.marks_keyframes else None
    which = which if segments else which[:, 0]
    return which, tables, masks, tokens, reuse, marked, _nag(plan.spec), segments


def _nag(spec: RunSpec) -> NormalizedGuidance | None:
    """The guidance of attention to the text."""
    if spec.nag_scale is None:
        return None
    return NormalizedGuidance(*(np.asarray(x, np.float32) for x in (spec.nag_scale, spec.nag_tau, spec.nag_alpha)))


def _conditions(stage: Stage, latents: Streams[Sequence[np.ndarray]]) -> Streams[Conditions | None]:
    """The conditions of a stage, with the latents of its videos and audio."""
    tokens = (
        [ConditionTokens(encoded[source][..., part, :], strength, start) for source, part, start, strength in slices]
        for slices, encoded in zip(stage.condition_slices, latents, strict=True)
    )
    merged = merge_conditions(Streams(*tokens), stage.token_shapes, stage.x0_sigma, stage.cross_timestep, stage.frozen)
    if stage.references:
        assert merged.video
        return merged._replace(video=merged.video._replace(references=stage.references))
    return merged


def _no_latents(plan: Plan, stage: Stage) -> Streams[list[np.ndarray]]:
    """Zeros in the shapes of the condition latents of a stage."""
    channels, latents = Streams(*(shape[1] for shape in stage.token_shapes)), plan.arch.compression.latents
    videos = [latents(shown.num_frames) * math.prod(shown.latent_size(stage.geometry)) for shown in stage.placed_videos]
    counts = Streams(videos, [stage.geometry.audio_frames] * stage.audio_conditions)
    zeros = Streams(
        *([np.zeros((count, width), np.float32) for count in of] for of, width in zip(counts, channels, strict=True))
    )
    if stage.holds_latents:
        for of, shape in zip(zeros, stage.token_shapes, strict=True):
            of.append(np.zeros((plan.batch_size, *shape), np.float32))
    return zeros


def _stage_schedule(
    stage: Stage,
) -> tuple[np.ndarray, np.ndarray, tuple[Streams[GuidanceWeights], ...], np.ndarray]:
    """The noise levels, the number of each step's set of passes, the guidance of each set, and the fraction of fresh
    noise."""
    choices = [*stage.pass_counts]
    guidance = tuple(Streams(*(traced_weights(stream, passes) for stream in stage.guidance)) for passes in choices)
    chosen = np.asarray([choices.index(passes) for passes in stage.step_passes], np.int32)
    return pad_steps(stage.sigmas), pad_steps(chosen), guidance, np.asarray(stage.eta, np.float32)


class StageRun:
    """A stage with its denoiser on the devices and all inputs except latents; `contexts` come from its connectors."""

    def __init__(
        self,
        plan: Plan,
        phase: Denoise,
        transformer: Transformer,
        contexts: Streams[Any],
        condition_latents: Streams[Sequence[np.ndarray]] = NO_CONDITION_LATENTS,
    ):
        self.plan, self.phase, self.transformer = plan, phase, transformer
        self.programs, stage = stage_programs(plan, phase.number, phase.window), phase.stage
        self.condition_latents = condition_latents
        text = self.programs.text(transformer, self.place(contexts))
        ends = _no_latents(plan, stage)
        latents = Streams(*([*of, *end[len(of) :]] for of, end in zip(condition_latents, ends, strict=True)))
        rows, self.schedule = self.place((_stage_rows(plan, stage, latents), _stage_schedule(stage)))
        self.inputs = DenoiserInputs(jax.block_until_ready(text), *rows)
        self.cache: StepCache | None = None  # of the steps of a batch

    def forget(self, latents: Streams[jax.Array]) -> None:
        """Begin with an empty cache, before the steps of latents [videos, tokens, channels]."""
        if self.programs.cache:
            self.cache = self.programs.cache(self.transformer, latents, self.inputs)

    @property
    def begin(self) -> Streams[np.ndarray] | None:
        """The latents [1, tokens, channels] that are noised where an edited clip is kept in part: its own, zeros for a
        stream that it lacks. None: the stage begins as noise."""
        stage = self.phase.stage
        if stage.begins_as == NO_CONDITIONS:
            return None
        zeros = Streams(*(np.zeros(shape, np.float32) for shape in stage.token_shapes))
        whole = zip(stage.begins_as, self.condition_latents, zeros, strict=True)
        return Streams(*(none[None] if number is None else of[number][None] for number, of, none in whole))

    def hold(self, clip: Streams[np.ndarray]) -> None:
        """Take the latents that the stage holds from the clips of a batch, tokens [videos, tokens, channels]."""
        if self.phase.stage.holds_latents:
            latents = Streams(*([*of, tokens] for of, tokens in zip(self.condition_latents, clip, strict=True)))
            self.inputs = self.inputs._replace(conditions=self.place(_conditions(self.phase.stage, latents)))

    def denoise(
        self, latents: Streams[jax.Array], batch: int, start: int, stop: int
    ) -> tuple[Streams[jax.Array], Streams[Any]]:
        """The latents of a batch after these steps, and whether each stream is finite."""
        part = self.seeds(batch), np.int32(start), np.int32(stop)
        kept = (self.cache, np.float32(self.phase.stage.first_block_cache)) if self.cache else ()
        inputs = self.transformer, latents, self.inputs, *self.schedule, *part, *kept
        latents, finite, *cache = self.programs.steps(*inputs)
        self.cache = cache[0] if cache else None
        return latents, finite

    def seeds(self, batch: int) -> np.ndarray:
        """The seed of each video of a batch, which draws its noise."""
        return window_seeds(self.plan.batches[batch], self.phase)

    def place(self, arrays: Any) -> Any:
        """Arrays of the host, whole on each device."""
        return to_devices(arrays, self.phase.stage.sharding.replicated)


def window_seeds(seeds: Sequence[int], phase: Denoise) -> np.ndarray:
    """The seeds that draw the noise of a phase: the videos' own, of later windows and of rounds made from these."""
    if not phase.window and not phase.clip.between_keyframes:
        return np.asarray(seeds, np.uint32)
    rounds = [len(phase.clip.windows)] if phase.clip.between_keyframes else []  # which each round has more of
    states = (np.random.SeedSequence([int(seed), *rounds, phase.window]).generate_state(1) for seed in seeds)
    return np.concatenate([*states]).astype(np.uint32)


def _noise(
    seeds: jax.Array, draw: jax.Array | None = None, *, shapes: Streams[LatentShape], stage: int, behind: int
) -> Streams[jax.Array]:
    """Noise of a stage, of its beginning or of a `draw` of its steps, including `behind` tokens behind the grid, which
    do not change the clip's noise."""
    videos = jax.vmap(lambda seed: to_tokens(noise(seed, shapes, stage, draw)))(seeds)
    video, audio = (stream[:, 0] for stream in videos)
    if behind:
        further = jax.vmap(lambda seed: noise_behind(seed, (behind, video.shape[2]), stage, draw))(seeds)
        video = jnp.concatenate([video, further], axis=1)
    return Streams(video, audio)


def _velocity(
    transformer: Transformer,
    latents: Streams[jax.Array],
    inputs: DenoiserInputs,
    sigma: jax.Array,
    branch: int | None = None,
    tile: Tile | None = None,
) -> Streams[jax.Array]:
    """Noise minus clean of latents [videos, tokens, channels] in every pass, [passes, videos, tokens, channels].
    `branch` in place of that of the inputs is known to the compiler. Of a `tile`: its latents alone."""
    if tile:
        latents, inputs = of_tile(tile, latents, inputs)
    if branch is not None and inputs.reuse:
        inputs = inputs._replace(reuse=replace(inputs.reuse, branch=branch))
    return _by_pass(transformer(in_its_dtype(transformer, latents), sigma, inputs), latents)


def _by_pass(rows: Streams[jax.Array], latents: Streams[jax.Array]) -> Streams[jax.Array]:
    """Rows [videos · passes, tokens, channels] as [passes, videos, tokens, channels]."""
    return Streams(
        *(
            stream.reshape(len(x), len(stream) // len(x), *stream.shape[1:]).swapaxes(0, 1)
            for stream, x in zip(rows, latents, strict=True)
        )
    )


def of_tile(
    tile: Tile, latents: Streams[jax.Array], inputs: DenoiserInputs
) -> tuple[Streams[jax.Array], DenoiserInputs]:
    """A tile's latents, and the inputs of its tokens, all that a forward reads of conditions being their noise levels.
    The ropes and what is known of tokens by their times are of its height and width already."""
    if video := inputs.conditions.video:
        video = video._replace(level=tile.of(jnp.asarray(video.level), 0))
    segments, ropes, marked = inputs.segments, inputs.ropes, inputs.keyframes
    if segments:
        segments = segments._replace(video=tile.of_planes(segments.video, 1))
    own, cross = (
        [[jax.tree.map(lambda table: tile.in_time(table, 0), grid[0]), *grid[1:]] for grid in grids]
        for grids in ropes.video
    )
    inputs = inputs._replace(
        conditions=inputs.conditions._replace(video=video),
        keyframes=None if marked is None else tile.of_planes(marked, 0),
        segments=segments,
        ropes=ropes._replace(video=Ropes(own, cross)),
    )
    return latents._replace(video=tile.of(latents.video, 1)), inputs


def _in_tiles(tiles: StageTiles, velocity: Callable[[Tile], Streams[jax.Array]], tokens: int) -> Streams[jax.Array]:
    """The velocities of all tiles, one after the other: of video's `tokens` blended by the tiles' weights, of audio
    their mean."""
    groups, parts = tiles.alike(), list[Streams[jax.Array]]()
    for group in groups:
        places = jnp.asarray([start for start, _ in group]), jnp.asarray([time.planes for _, time in group])
        parts.append(jax.lax.map(lambda place: velocity(tiles.at(*place)), places))
    planes, (*rows, _, channels) = tokens // math.prod(tiles.clip), parts[0].video.shape[1:]
    video, (height, width) = jnp.zeros((*rows, planes, *tiles.clip, channels), jnp.float32), tiles.size
    for group, part in zip(groups, parts, strict=True):
        for tile, ((top, left), time) in zip(part.video, group, strict=True):
            inside = (..., np.asarray(time.planes), slice(top, top + height), slice(left, left + width), slice(None))
            weights = np.asarray(time.weights, np.float32)[:, None, None] * tiles.weights[top, left]
            video = video.at[inside].add(tile.reshape(*rows, -1, *tiles.size, channels) * weights[..., None])
    audio = jnp.concatenate([part.audio.astype(jnp.float32) for part in parts]).mean(0)
    return Streams(video.reshape(*rows, tokens, channels), audio)


def in_its_dtype(transformer: Transformer, latents: Streams[jax.Array]) -> Streams[jax.Array]:
    dtype = next(stream for stream in (transformer.video, transformer.audio) if stream).proj_in.kernel.dtype
    return Streams(*(stream.astype(dtype) for stream in latents))


def _denoise_steps(
    transformer: Transformer,
    latents: Streams[jax.Array],
    inputs: DenoiserInputs,
    sigmas: jax.Array,
    chosen: jax.Array,
    guidance: tuple[Streams[GuidanceWeights], ...],
    eta: jax.Array,
    seeds: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    cache: StepCache | None = None,
    threshold: jax.Array | None = None,
    *,
    choices: tuple[tuple[Pass, ...], ...],
    sampler: Sampler,
    tiles: StageTiles | None,
    **sizes: Any,
) -> tuple[Any, ...]:
    """Latents after these steps, whether each stream is finite, and the cache after them if there is one."""

    def velocity(passes: tuple[Pass, ...], latents: Streams[jax.Array], sigma: jax.Array) -> Streams[jax.Array]:
        run = partial(_velocity, transformer, latents, inputs.of_passes(passes), sigma)
        return _in_tiles(tiles, lambda tile: run(tile=tile), latents.video.shape[1]) if tiles else run()

    def cached(
        latents: Streams[jax.Array], sigma: jax.Array, layers: LayerCache
    ) -> tuple[Streams[jax.Array], LayerCache, jax.Array]:
        assert threshold is not None
        tokens = in_its_dtype(transformer, latents)
        rows, layers, skipped = transformer.with_cache(tokens, sigma, inputs, layers, threshold)
        return _by_pass(rows, latents), layers, skipped

    draw = partial(_noise, seeds, **sizes)
    if cache is None:
        sets = [StepPasses(partial(velocity, passes), own) for passes, own in zip(choices, guidance, strict=True)]
        latents = denoise(sets, latents, sigmas, chosen, start, stop, sampler, draw, eta, inputs.conditions)
    else:
        (weights,), schedule = guidance, (sigmas, start, stop, sampler, draw, eta)
        latents, cache = denoise_with_cache(cached, weights, cache, latents, *schedule, inputs.conditions)
    finite = Streams(*(jnp.isfinite(stream).all() for stream in latents))
    return (latents, finite) if cache is None else (latents, finite, cache)
