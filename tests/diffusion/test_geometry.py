"""The sizes of upsampled clips, by numbers that can be counted."""

import numpy as np
import pytest

from ltx2_cli.diffusion.geometry import (
    LatentScale,
    ReferenceGrid,
    ReferenceScale,
    UpsampleFactors,
    VAECompression,
    clip_geometry,
    stage1_size,
)
from ltx2_cli.errors import UsageError

COMPRESSION = VAECompression(8, 32, 25.0)
TWICE, HALF_MORE, DENSER = UpsampleFactors(1, 2, 1), UpsampleFactors(1, 3, 2), UpsampleFactors(2, 1, 1)


@pytest.mark.parametrize(
    ("by", "latents", "size"),
    [
        (TWICE, (16, 16, 24), (121, 512, 768)),
        (HALF_MORE, (16, 12, 18), (121, 384, 576)),
        (DENSER, (31, 8, 12), (241, 256, 384)),
        (UpsampleFactors(2, 2, 1), (31, 16, 24), (241, 512, 768)),
    ],
)
def test_sizes_upsampled_from_121_by_256_by_384(by, latents, size):
    assert by.upsampled(16, 8, 12) == latents
    assert stage1_size(*size, by, COMPRESSION) == (121, 256, 384)


def test_upsampled_odd_sides_are_rounded_up():
    assert HALF_MORE.upsampled(2, 3, 1) == (2, 5, 2)  # 4.5 and 1.5 latents
    assert stage1_size(9, 160, 64, HALF_MORE, COMPRESSION) == (9, 96, 32)


def makeable(by: UpsampleFactors, num_frames: int, side: int) -> bool:
    try:
        return bool(stage1_size(num_frames, side, side, by, COMPRESSION))
    except UsageError:
        return False


def test_possible_frame_counts():
    assert [n for n in range(1, 70) if makeable(DENSER, n, 32)] == [1, 17, 33, 49, 65]
    assert [n for n in range(1, 34) if makeable(TWICE, n, 64)] == [1, 9, 17, 25, 33]


def test_possible_sides():
    assert [side for side in range(1, 260) if makeable(TWICE, 9, side)] == [64, 128, 192, 256]
    assert [side for side in range(1, 260) if makeable(HALF_MORE, 9, side)] == [64, 96, 160, 192, 256]


@pytest.mark.parametrize(
    ("size", "by", "said"),
    [
        ((121, 512, 768), DENSER, ["num_frames 121 is not 16k + 1", "--num-frames 113 or 129"]),
        ((121, 544, 992), TWICE, ["height 544 is not a multiple of 64", "--height 512 or 576", "--width 960 or 1024"]),
        ((121, 128, 768), HALF_MORE, ["height 128 is not 3/2 of a first stage's side", "--height 96 or 160"]),
        ((0, 5, 5), TWICE, ["--num-frames 1", "--height 64", "--width 64"]),
    ],
)
def test_an_impossible_size_is_refused_with_the_nearest(size, by, said):
    with pytest.raises(UsageError) as error:
        stage1_size(*size, by, COMPRESSION)
    sentences = str(error.value).splitlines()
    assert len(sentences) == sum("--" in text for text in said)
    assert all(any(text in sentence for sentence in sentences) for text in said)
    assert all("as two stages need; nearest: --" in sentence for sentence in sentences)


def test_references_lie_where_the_clip_is_that_they_are_of():
    """A reference of half the size and a third of the rate: its first frame is the clip's first, and its second latent
    of eight frames is of 24 of the clip, from the second on."""
    scales = LatentScale(time=8, height=32, width=32, mel=4, mel_hop=160, sampling_rate=16000, causal_offset=1)
    references = (ReferenceGrid(2, ReferenceScale(2, 3)), ReferenceGrid(1, ReferenceScale(1, 1)))
    geometry = clip_geometry(25, 64, 128, 24.0, COMPRESSION, scales, ((4, 5),), references)
    assert geometry.token_counts == (32, 8, 4, 8)
    cells = (np.meshgrid(*axes, indexing="ij") for axes in geometry.video_axes())
    positions = np.concatenate([np.stack(grid, axis=-1).reshape(-1, 3) for grid in cells])
    first, *_, last = positions[40:44]
    np.testing.assert_allclose(first, [0.5 / 24, 32, 32])
    np.testing.assert_allclose(last, [(1 + 25) / 2 / 24, 32, 96])
    np.testing.assert_array_equal(positions[44:], positions[:8])
