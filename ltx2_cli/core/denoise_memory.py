"""Memory of a stage's steps on a device, by formula, and whether the decoders fit beside them."""

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import jax

from ltx2_cli.core.components import placement
from ltx2_cli.models.networks import DENOISER
from ltx2_cli.nn.kernels.xla import SCORE_BYTES
from ltx2_cli.nn.token_parts import part_sizes
from ltx2_cli.parallel.constrain import activate
from ltx2_cli.parallel.devices import computes_in_float32
from ltx2_cli.plan.decoding import bytes_left_after
from ltx2_cli.plan.resolve import DECODERS, Plan
from ltx2_cli.plan.stages import Stage
from ltx2_cli.plan.step_cost import text_bytes
from ltx2_cli.request.spec import AttentionBackend, Streams
from ltx2_cli.units import FLOAT32_BYTES
from ltx2_cli.weights.declare import kinds, weights
from ltx2_cli.weights.quantized_matrix import INT4, Place, bytes_on_device, bytes_on_host, placed

MLP_EXPANSION = 4
LIVE_FORWARD = 4  # buffers as large as the feed-forward's inner activation that one layer holds at a time
ALL_TOKENS = 0.375  # of that memory on a GPU, for all tokens; the rest is for the largest part of them
LIVE_CACHE = 4  # times what the cache of the first block keeps: itself, and copies while it is compared and renewed
TURNS_HERE = 3  # whose layers are here, of those on the host: the one in work, the next one, its place in the state
SCORE_COPIES = 2  # of attention scores in float32: they themselves, and their softmax


def decodes_beside(plan: Plan) -> bool:
    """Whether the decoders fit into memory beside the denoisers, so that they are sent while the last steps run, and
    each batch is decoded when it is done."""
    left = bytes_left_after(plan.keep_resident, plan.networks, plan.sharding, (DENOISER, *DECODERS))
    text = text_bytes(plan.spec, plan.arch.transformer, len(plan.prompts), plan.stages[-1].sharding)
    steps = (denoise_bytes(plan, stage.largest_window) for stage in plan.stages if stage.steps)
    return left >= max(plan.decoding.bytes + text, *steps, 0)


def kept_networks(plan: Plan) -> tuple[str, ...]:
    """Networks kept between batches: the decoders, if they fit beside the denoiser."""
    return DECODERS if len(plan.batches) > 1 and decodes_beside(plan) else ()


def host_bytes(plan: Plan, name: str) -> int:
    """Bytes of a network in the host's memory for each device."""
    return network_bytes(plan, name, bytes_on_host)


def network_bytes(plan: Plan, name: str, counted: Callable[[Any, Place], int] = bytes_on_device) -> int:
    """Bytes of a network on each device, without the padding of tiles. Weights of one kind are placed once."""
    place = placement(plan, name)
    return sum(len(alike) * counted(alike[0].get_value(), place(alike[0])) for alike in kinds(plan.network(name)))


def denoise_bytes(plan: Plan, stage: Stage) -> int:
    """A stage's loop: the text, rotary tables, latents, the activations of one layer, and copies of weights."""
    arch, itemsize = plan.arch.transformer, plan.spec.dtype.itemsize
    streams, audio_width = arch.streams, arch.streams.audio.width
    text = text_bytes(plan.spec, arch, len(plan.prompts), stage.sharding)
    # In float32: sines and cosines for self-attention and towards the other stream, split over devices; latents and the
    # velocities of all passes, whole.
    tokens = Streams(stage.tile_geometry.video_tokens, stage.geometry.audio_frames)
    widths = [stream.width for stream in streams]
    ropes = sum(
        2 * FLOAT32_BYTES * count * (width + audio_width) // 2 for count, width in zip(tokens, widths, strict=True)
    )
    ropes //= stage.sharding.parts("tokens") * stage.sharding.parts("heads")
    latents = FLOAT32_BYTES * sum(map(math.prod, stage.shapes)) * plan.batch_size * (1 + len(stage.passes))
    if stage.tiles:  # the velocities of all, before they are blended
        of_tiles = int(stage.tile_turns * tokens.video) * stage.shapes.video[1]
        latents += FLOAT32_BYTES * of_tiles * plan.batch_size * len(stage.passes)
    rows = _parts(len(stage.passes) * plan.batch_size, stage, "rows")
    local = Streams(_parts(tokens.video, stage, "tokens"), _parts(tokens.audio, stage, "audio_tokens"))
    inner = sum(
        count * MLP_EXPANSION * _parts(width, stage, "heads") for count, width in zip(local, widths, strict=True)
    )
    layer = LIVE_FORWARD * rows * inner * itemsize
    if stage.sharding.mesh.devices.flat[0].platform == "gpu":
        layer = round(layer * (ALL_TOKENS + (1 - ALL_TOKENS) * _largest_part(plan, stage)))
    if stage.sharding.attention is AttentionBackend.xla:  # in the other kernels scores stay inside
        scores = FLOAT32_BYTES * rows * _parts(streams.video.heads, stage, "heads") * local.video * tokens.video
        layer += SCORE_COPIES * min(scores, SCORE_BYTES)
    copies = 0
    if stage.sharding.bf16_tile_sublanes:  # libtpu copies matrices outside the layers to another layout before the loop
        matrices = (weight for weight in weights(plan.network(stage.network)) if len(weight.shape) == 2)
        copies = sum(math.prod(weight.shape) * weight.dtype.itemsize for weight in matrices)
    cached = 0
    if stage.first_block_cache is not None:  # what the first layer added to a stream, and all others to both
        added = [count * width for count, width in zip(local, widths, strict=True)]
        cached = LIVE_CACHE * rows * itemsize * (added[0 if local.video else 1] + sum(added))
    return text + ropes + latents + layer + cached + copies + copied_bytes(plan, stage.network, arch.num_layers)


def copied_bytes(plan: Plan, name: str, layers: int, turns_here: int = TURNS_HERE) -> int:
    """Bytes on a device of copies of a network's weights: of layers that came from the host; of a layer of int4, whose
    numbers are unpacked, but for TPUs, where products do that; and where XLA computes in float32, of the largest
    matrix that is multiplied, on a CPU of a whole layer."""
    arrived, device = turns_here * host_bytes(plan, name) // layers, plan.sharding.mesh.devices.flat[0]
    on_cpu, widens = device.platform == "cpu", computes_in_float32(device)
    if device.platform == "tpu":
        return arrived
    place, layer, largest = placement(plan, name), 0, 0
    for alike in kinds(plan.network(name)):
        value, stacked = alike[0].get_value(), bool(alike[0].layers)
        unpacked, multiplied = value.dtype == INT4, "vocab" not in alike[0].axes
        if not (unpacked or on_cpu or (widens and multiplied)):
            continue
        matrix = max(jax.tree.leaves(placed(value, place(alike[0]))), key=attrgetter("size"))
        if matrix.ndim == 1 or matrix.dtype.itemsize == FLOAT32_BYTES:
            continue
        numbers = math.prod(matrix.sharding.shard_shape(value.shape))
        if stacked and (on_cpu or unpacked):
            layer += len(alike) * numbers * (FLOAT32_BYTES if on_cpu else 1) // layers
        if stacked and widens and not on_cpu:
            largest = max(largest, numbers * FLOAT32_BYTES // layers)
        if not stacked:
            largest = max(largest, numbers * (FLOAT32_BYTES if widens else 1))
    return arrived + layer + largest


def _largest_part(plan: Plan, stage: Stage) -> float:
    """The largest part of a device's tokens that its layers compute at a time, relative to all."""
    if not stage.tile_geometry.video_tokens:
        return 1.0
    with activate(stage.sharding):
        rows, tokens = len(stage.passes) * plan.batch_size, stage.tile_geometry.video_tokens
        sizes = part_sizes(rows, tokens, "tokens", eight_bits=False)
    return max(sizes) / sum(sizes)


def _parts(size: int, stage: Stage, axis: str) -> int:
    """Size of an axis on a device; an axis that does not divide is not split."""
    parts = stage.sharding.parts(axis)
    return -(-size // parts) if axis.endswith("tokens") or not size % parts else size
