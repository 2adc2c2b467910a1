"""The stages of a run: the clip from noise, and the clip upsampled, noised again and refined."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple

import numpy as np

from ltx2_cli.diffusion.geometry import Geometry, clip_geometry
from ltx2_cli.diffusion.guidance import Pass, needed_passes
from ltx2_cli.diffusion.latents import Shape, file_shapes
from ltx2_cli.diffusion.upsampling import source_size
from ltx2_cli.models.arch import Arch
from ltx2_cli.models.lora import find_adapters
from ltx2_cli.models.networks import Checkpoint, Networks
from ltx2_cli.models.original.names import RENAMINGS
from ltx2_cli.models.upsampler import LatentUpsampler, LatentUpsamplerArch
from ltx2_cli.sharding import ShardingPlan
from ltx2_cli.spec import AV, OFF, DType, Guidance, RunSpec, ShiftTokens, StgRule, StreamGuidanceSpec
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.lora import LoraFile, LowRank

REFERENCE_TOKENS = 4096
DENOISER, REFINER = "transformer", "refiner"
CONNECTORS, REFINERS_CONNECTORS = "connectors", "refiner_connectors"
UNREFINED = (0.0,)  # the noise levels of upsampled latents that are left as they are

Loras = Sequence[tuple[LoraFile, float]]  # each with its strength
Added = Mapping[str, Mapping[str, LowRank]]  # to which tensors of which network


@dataclass(frozen=True)
class Stage:
    """One run of the denoising loop, and what it begins with."""

    geometry: Geometry
    shapes: AV[Shape]  # of one video's latents in a file
    sigmas: np.ndarray  # no steps: nothing is denoised
    passes: tuple[Pass, ...]
    guidance: AV[Guidance]
    stg_blocks: tuple[int, ...]
    network: str  # the denoiser's name among the plan's networks
    connectors: str  # the name of those that make the text it reads
    sharding: ShardingPlan  # of that network and the loop
    source: AV[Shape] | None  # of the latents that are upsampled and noised to begin with; None: it begins as noise


class Source(NamedTuple):
    """Latents that a run goes on from."""

    shapes: AV[Shape]  # of one video's in a file
    fps: float


@dataclass(frozen=True)
class Refinement:
    """What a second stage takes besides the checkpoint."""

    upsampler: LatentUpsamplerArch
    files: TensorFiles | None  # None: the networks are described, not loaded
    loras: Loras


def with_refiner(
    networks: Networks, checkpoint: Checkpoint, added: Added, refinement: Refinement, dtype: DType
) -> tuple[Networks, Checkpoint, Added]:
    """With the networks of a second stage, and a denoiser of its own where LoRAs are added to that.

    Raises `SpecError` for a LoRA that does not fit.
    """
    files = dict(checkpoint.files)
    if refinement.files is not None:
        files |= {"upsampler": refinement.files, "statistics": files["vae"]}
    upsampler = LatentUpsampler(Scope(dtype.value), refinement.upsampler)
    networks = networks._replace(upsampler=upsampler, statistics=networks.vae.statistics)
    if refinement.loras:
        theirs = find_adapters(refinement.loras, networks, RENAMINGS)
        if theirs[CONNECTORS]:
            networks = networks._replace(refiner_connectors=networks.connectors)
            files[REFINERS_CONNECTORS] = files[CONNECTORS]
            added = {**added, REFINERS_CONNECTORS: _sum(added[CONNECTORS], theirs[CONNECTORS])}
        networks = networks._replace(refiner=networks.transformer)
        added = {**added, REFINER: theirs[DENOISER]}
        if refinement.files is not None:
            files[REFINER] = files[DENOISER]
    return networks, replace(checkpoint, files=files), added


def _sum(*added: Mapping[str, LowRank]) -> dict[str, LowRank]:
    """All that is added to each tensor."""
    names = {name for each in added for name in each}
    return {name: LowRank(tuple(part for each in added if name in each for part in each[name].parts)) for name in names}


def enlarged(spec: RunSpec, arch: Arch, refinement: Refinement, source: Source) -> RunSpec:
    """The request for what the upsampler makes of these latents."""
    by, (_, _, frames, height, width) = refinement.upsampler.upsampling, source.shapes.video
    return replace(
        spec,
        num_frames=arch.compression.frames * (by.frames(frames) - 1) + 1,
        height=arch.compression.pixels * by.side(height),
        width=arch.compression.pixels * by.side(width),
        fps=source.fps * _faster(spec, refinement),
    )


def _faster(spec: RunSpec, refinement: Refinement) -> int:
    """By which factor the upsampled clip has more frames a second."""
    return 1 if spec.refinement.lengthen else refinement.upsampler.upsampling.time


def stages(
    spec: RunSpec,
    arch: Arch,
    networks: Networks,
    refinement: Refinement | None,
    source: Source | None,
    lay_out: Callable[[int], ShardingPlan],
) -> tuple[Stage, ...]:
    """All stages of a run, or the one that goes on from `source`.

    `lay_out` divides the devices for so many rows. Raises `SpecError` for a size that no upsampler makes.
    """
    channels = AV(arch.transformer.in_channels, arch.transformer.audio_in_channels)

    def measured(size: tuple[int, int, int], fps: float) -> tuple[Geometry, AV[Shape]]:
        geometry = clip_geometry(*size, fps, arch.compression, arch.transformer.scales)
        return geometry, file_shapes(geometry, channels, arch.audio_vae.latent_mels)

    size = spec.num_frames, spec.height, spec.width
    first = size if refinement is None else source_size(*size, refinement.upsampler.upsampling, arch.compression)
    guidance, passes, videos = _guidance(spec, arch), recipe_passes(spec, arch), spec.num_videos
    rows, refined = len(passes) * videos, networks.refiner is not None
    made = []
    before = source and source.shapes
    if before is None:
        geometry, before = measured(first, spec.fps if refinement is None else spec.fps / _faster(spec, refinement))
        shared = refinement is not None and not refined
        sharding = lay_out(gcd(rows, videos) if shared else rows)
        sigmas = _sigmas(spec, arch, geometry)
        made.append(
            Stage(
                geometry, before, sigmas, passes, guidance, spec.stg_blocks or (), DENOISER, CONNECTORS, sharding, None
            )
        )
    if refinement is not None:
        sigmas = np.asarray(spec.refinement.sigmas or UNREFINED, np.float32)
        network, off = REFINER if refined else DENOISER, AV(OFF, OFF)
        text = CONNECTORS if networks.refiner_connectors is None else REFINERS_CONNECTORS
        made.append(
            Stage(*measured(size, spec.fps), sigmas, (Pass.COND,), off, (), network, text, lay_out(videos), before)
        )
    return tuple(made)


def recipe_passes(spec: RunSpec, arch: Arch) -> tuple[Pass, ...]:
    """The passes of a step of the first stage."""
    return needed_passes(_guidance(spec, arch))


def _guidance(spec: RunSpec, arch: Arch) -> AV[Guidance]:
    guidance = AV(_complete(spec.guidance.video), _complete(spec.guidance.audio))
    if not spec.stg_blocks or (spec.stg_rule is StgRule.config and not arch.transformer.perturbed_attn):
        return AV(*(replace(stream, stg_scale=0.0) for stream in guidance))
    return guidance


def _complete(stream: StreamGuidanceSpec) -> Guidance:
    return Guidance(*(scale for scale in vars(stream).values() if scale is not None))


def _sigmas(spec: RunSpec, arch: Arch, geometry: Geometry) -> np.ndarray:
    """The noise levels float32 [steps + 1]: those that are given, else those of the checkpoint's schedule."""
    if spec.sigmas is not None:
        return np.asarray(spec.sigmas, np.float32)
    assert spec.num_inference_steps is not None
    tokens = geometry.video_tokens if spec.shift_tokens is ShiftTokens.actual else REFERENCE_TOKENS
    return arch.scheduler.sigmas(spec.num_inference_steps, tokens)
