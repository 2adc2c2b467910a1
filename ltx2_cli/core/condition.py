"""Pictures and sounds to latents, for each stage that has them, at its size."""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ltx2_cli.core.components import CONDITION, Components, check_finite, memory_for, network_program
from ltx2_cli.core.programs import Program, jitted
from ltx2_cli.core.report import Report
from ltx2_cli.media.pictures import compressed, covering
from ltx2_cli.models.video_vae import VideoVAE
from ltx2_cli.nn.layers import IMAGE_AXES
from ltx2_cli.plan.decoding import image_mesh
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import PICTURE_ENCODER, Stage
from ltx2_cli.request.spec import Streams
from ltx2_cli.sharding import to_devices, to_host

WHOLE = PartitionSpec()
Latents = list[np.ndarray]  # of each picture or sound of a stage, normalised float32 [tokens, channels]


def encode_conditions(plan: Plan, first: int, components: Components, report: Report) -> dict[int, Streams[Latents]]:
    """By the number of the stage, the latents of its pictures and of its sounds, for the phases from `first`."""
    pictures = _encode_pictures(plan, first, components, report)
    return {number: Streams(latents, []) for number, latents in pictures.items()}


def condition_programs(plan: Plan, first: int) -> list[Program]:
    """The programs that `encode_conditions` runs."""
    return _picture_programs(plan, first)


def _encode_pictures(plan: Plan, first: int, components: Components, report: Report) -> dict[int, Latents]:
    stages = _showing(plan, first)
    if not stages:
        return {}
    latents = dict[int, Latents]()
    read = zip(plan.pictures, plan.spec.conditions, strict=True)
    clips = [_compressed(plan, picture.frames) if of.kind == "image" else picture.frames for picture, of in read]
    with memory_for(CONDITION, plan), components.use(PICTURE_ENCODER, report) as vae, report.stage(CONDITION):
        for number, stage in stages.items():
            where, size, encoded = _parts(plan, stage), _size(plan, stage), list[np.ndarray]()
            for shown in stage.pictures:
                clip = np.stack([covering(frame, *size).reshape(size[0], -1) for frame in clips[shown.number]])
                run = picture_program(plan, stage, len(clip))
                encoded.append(to_host(run(vae, to_devices(clip[None], where))))
            check_finite([np.isfinite(array).all() for array in encoded], "the latents of a picture are", plan)
            latents[number] = [array.reshape(-1, array.shape[-1]) for array in encoded]
    return latents


def _picture_programs(plan: Plan, first: int) -> list[Program]:
    stages = _showing(plan, first).values()
    counts = [(stage, sorted({shown.num_frames for shown in stage.pictures})) for stage in stages]
    return [picture_program(plan, stage, count) for stage, sizes in counts for count in sizes]


def picture_program(plan: Plan, stage: Stage, num_frames: int) -> Program:
    """Pixels in [-1, 1] [videos, frames, height, width · 3] of a stage's size to normalised latents [videos, frames,
    height, width, channels]; both lie in parts on the devices."""
    where, (height, width) = _parts(plan, stage), _size(plan, stage)
    pixels = jax.ShapeDtypeStruct((1, num_frames, height, 3 * width), np.float32, sharding=where)
    function = jitted(_latents, where, plan.sharding, convolves=True, where=where)
    name = f"picture {width}x{height}" if num_frames == 1 else f"video {width}x{height}x{num_frames}"
    return network_program(plan, name, [PICTURE_ENCODER], function, pixels)


def _compressed(plan: Plan, frames: np.ndarray) -> np.ndarray:
    return np.stack([compressed(frame, plan.spec.image_crf) for frame in frames])


def _parts(plan: Plan, stage: Stage) -> NamedSharding:
    """How the devices share the images of a stage's size."""
    devices = plan.sharding.mesh.devices.ravel()
    mesh = image_mesh(devices, (1, stage.geometry.height, stage.geometry.width))
    return NamedSharding(mesh, PartitionSpec(None, None, *IMAGE_AXES))


def _showing(plan: Plan, first: int) -> dict[int, Stage]:
    """The stages of the phases from `first` that show pictures, by their numbers."""
    phases = [phase for phase in plan.phases[first:] if not phase.upsamples]
    return {phase.number: phase.stage for phase in phases if phase.stage.pictures}


def _size(plan: Plan, stage: Stage) -> tuple[int, int]:
    """Height and width of a stage's clip in pixels."""
    pixels = plan.arch.compression.pixels
    return stage.geometry.height * pixels, stage.geometry.width * pixels


def _latents(vae: VideoVAE, pixels: jax.Array, where: NamedSharding) -> jax.Array:
    """Colours lie along the width: an array whose last axis is 3 takes an accelerator forty times its size."""

    def part(vae: VideoVAE, pixels: jax.Array) -> jax.Array:
        return vae.encode(pixels.reshape(*pixels.shape[:3], -1, 3))

    return jax.shard_map(part, mesh=where.mesh, in_specs=(WHOLE, where.spec), out_specs=where.spec)(vae, pixels)
