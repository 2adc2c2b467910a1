"""How decoding is divided, at the published size."""

import sys
from types import FrameType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from devices import gpu
from ltx2_cli.models.video_vae import VideoDecoder, VideoVAEArch
from ltx2_cli.plan.decoding import DecodePlan, _splits, plan_tiling
from ltx2_cli.plan.video_tiles import Tiles, copying_factor, tiled_work, video_decode_bytes
from ltx2_cli.weights.declare import Scope

CLIP = (16, 16, 24)  # 768x512, 121 frames
DECODER = VideoDecoder(Scope(jnp.bfloat16), VideoVAEArch(decoder_causal=False))


def shape(decoding: DecodePlan) -> tuple[int, ...]:
    return tuple(decoding.mesh.shape.values())


def divided(videos: int, size: tuple[int, int, int] = CLIP, devices: int = 8, room: float = 80e9) -> DecodePlan:
    return plan_tiling(DECODER, videos, size, np.array(jax.devices()[:devices]), room)


@pytest.mark.parametrize(
    ("videos", "parts"),
    [
        (1, (1, 2, 4, 1)),
        (2, (2, 1, 4, 1)),
        (8, (8, 1, 1, 1)),
        (16, (8, 1, 1, 1)),
        (9, (2, 1, 4, 1)),  # five rounds of quarters, where two of whole images would be one for a single video
    ],
)
def test_videos_are_divided_over_the_devices_first(videos: int, parts: tuple[int, ...]) -> None:
    decoding = divided(videos)
    assert shape(decoding) == parts
    assert decoding.tiles is None
    assert decoding.mesh.devices.ravel().tolist() == jax.devices()[:8]


def test_indivisible_sides_leave_devices_unused() -> None:
    assert shape(divided(1, (1, 7, 6), devices=8)) == (1, 1, 2, 4)
    assert shape(divided(1, (1, 3, 3), devices=8)) == (1, 1, 1, 8)


def test_little_memory_means_tiles() -> None:
    whole = divided(1, devices=1)
    assert (shape(whole), whole.tiles) == ((1, 1, 1, 1), None)
    largest = 121 * 128 * 192 * 128 * 4  # bytes of 128 channels at a quarter of the pixels, in float32 on a CPU
    assert whole.bytes == 7 * largest + 121 * 512 * 768 * 3
    less = divided(1, devices=1, room=0.5 * whole.bytes)
    assert less.tiles is not None
    assert less.bytes <= 0.5 * whole.bytes
    assert divided(1, room=0.5 * whole.bytes).tiles is None  # eight devices need none


def test_little_memory_costs_little_work() -> None:
    """1920x1088, 121 frames, in what a GPU of 8 GB has beside the weights: the layers before the cut work once, those
    behind it go on some frames beyond the end."""
    size, room = (16, 34, 60), 5.4e9
    plan = plan_tiling(DECODER, 1, size, np.array(gpu(8)), room)
    assert isinstance(plan.tiles, Tiles)
    assert (plan.tiles.counts, plan.tiles.frames_at_once > 0) == ((1, 1), True)
    assert plan.video_bytes < room < video_decode_bytes(DECODER, size, None, *gpu(8)) / 5
    assert 1 < tiled_work(DECODER, size, plan.tiles) < 1.5
    assert copying_factor(DECODER, plan.tiles) < 3


@pytest.mark.parametrize("seconds", [10, 60])
def test_a_longer_clip_takes_the_memory_of_its_levels_and_of_few_layers_more(seconds: int) -> None:
    frames = 3 * seconds + 1
    plan = divided(1, (frames, 16, 24), devices=1, room=0)
    levels, shallow = 3 * 512 * 768 * (8 * frames - 7), 4 * frames * 16 * 24 * 1024
    assert plan.video_bytes - levels < 2.4e9 + 11 * shallow


def test_a_clip_that_never_fits_gets_the_smallest_memory() -> None:
    least = divided(1, devices=1, room=0)
    assert least.bytes < divided(1, devices=1).bytes / 3


def test_splits_of_many_devices_take_linear_time() -> None:
    """Lines of Python that run, counted: all triples up to 1024 would be a thousand million."""
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> object:
        nonlocal lines
        lines += event == "line"
        assert lines < 50_000
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        splits = list(_splits(1024, (16, 34, 60)))
    finally:
        sys.settrace(before)
    sizes = {(split.videos, split.height, split.width) for split in splits}
    assert len(sizes) == len(splits) == 8 * 6 + 5 + 3 + 1  # 2 heights x 3 widths for up to 128 videos at once
