"""Keyframes of a clip, drawn again at a larger size: decoded one by one, enlarged and encoded."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from PIL import Image

from ltx2_cli.core.advice import check_finite
from ltx2_cli.core.components import Components, network_program
from ltx2_cli.core.conditions import image_sharding, video_program
from ltx2_cli.core.programs import Program
from ltx2_cli.core.report import Report
from ltx2_cli.models.video_vae import VideoVAE
from ltx2_cli.parallel.arrays import to_devices, to_host
from ltx2_cli.parallel.jit import jitted
from ltx2_cli.plan.inputs import VIDEO_ENCODER
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import Stage


def enlarged_keyframes(
    plan: Plan, stage: Stage, keyframes: np.ndarray, components: Components, report: Report
) -> np.ndarray:
    """Tokens [videos, tokens, channels] of keyframes of the stage's source, at the size of the stage."""
    assert stage.source is not None
    (_, channels, _, *size), geometry = stage.source.video, stage.geometry
    latents = keyframes.reshape(-1, 1, 1, *size, channels)
    draw, encode = keyframe_programs(plan, stage)
    height, width = (side * plan.arch.compression.pixels for side in (geometry.height, geometry.width))
    with components.use(VIDEO_ENCODER, report) as vae, report.activity("draw keyframes again"):
        where = image_sharding(plan, (size[0], size[1])), image_sharding(plan, (geometry.height, geometry.width))
        drawn = [draw(vae, to_devices(each, where[0])) for each in latents]
        check_finite([to_host(finite) for _, finite in drawn], "the decoded keyframes are", plan)
        pixels = [_enlarged(to_host(levels)[0, 0], height, width) for levels, _ in drawn]
        encoded = np.concatenate([to_host(encode(vae, to_devices(each, where[1]))) for each in pixels])
    check_finite([np.isfinite(encoded).all()], "the latents of the keyframes are", plan)
    return encoded.reshape(len(keyframes), -1, channels)


def keyframe_programs(plan: Plan, stage: Stage) -> list[Program]:
    """The programs of `enlarged_keyframes`, for one keyframe: to levels and whether they are finite, and to latents."""
    assert stage.source is not None
    (_, channels, _, height, width), geometry = stage.source.video, stage.geometry
    where = image_sharding(plan, (height, width))
    latents = jax.ShapeDtypeStruct((1, 1, height, width, channels), np.float32, sharding=where)
    function = jitted(_levels, None, plan.sharding, convolves=True, sizes=latents.shape, where=where)
    draw = network_program(plan, "decode keyframe", [VIDEO_ENCODER], function, latents)
    return [draw, video_program(plan, (geometry.height, geometry.width), 1)]


def _levels(vae: VideoVAE, latents: jax.Array, where: NamedSharding) -> tuple[jax.Array, jax.Array]:
    """Normalised latents [1, 1, height, width, channels] to 8 bits [1, 1, height, width · 3]."""

    def part(vae: VideoVAE, latents: jax.Array) -> tuple[jax.Array, jax.Array]:
        pixels = vae.decode(latents).astype(jnp.float32)
        levels = jnp.round((jnp.clip(pixels, -1, 1) + 1) * 127.5).astype(jnp.uint8)
        return levels.reshape(*levels.shape[:3], -1), jnp.isfinite(pixels).all().reshape(1, 1, 1, 1)

    specs = (PartitionSpec(), where.spec)
    split = jax.shard_map(part, mesh=where.mesh, in_specs=specs, out_specs=(where.spec, where.spec))
    return split(vae, latents)


def _enlarged(levels: np.ndarray, height: int, width: int) -> np.ndarray:
    """An image of 8 bits [height, width · 3] at another size, as `video_program` takes it."""
    image = Image.fromarray(levels.reshape(len(levels), -1, 3)).resize((width, height), Image.Resampling.LANCZOS)
    return (np.asarray(image, np.float32) / 127.5 - 1).reshape(1, 1, height, 3 * width)
