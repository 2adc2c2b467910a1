"""Sizes and lengths as people say them."""

import re

import pytest

from ltx2_cli.diffusion.geometry import VAECompression, clip_lengths
from ltx2_cli.errors import UsageError
from ltx2_cli.request.size import frames_of, size_of

LEGAL = clip_lengths(VAECompression(frames=8, pixels=32, audio_rate=25))


@pytest.mark.parametrize(
    ("aspect", "resolution", "width", "height"),
    [
        ("16:9", "720p", 1280, 704),  # 720 lies between 704 and 736: the smaller
        ("16:9", "1080p", 1920, 1088),
        ("9:16", "720p", 704, 1280),
        ("1:1", "512p", 512, 512),
        (None, "1024p", 1536, 1024),  # 3:2, as the request without it
        ("16:9", None, 832, 480),  # as many pixels as 768x512, nearly
        ("1:1", None, 640, 640),
        ("2.39:1", None, 960, 416),
        ("100:1", "32p", 3200, 32),
        ("1:1", "5p", 32, 32),
    ],
)
def test_a_size_is_the_nearest_legal_one(aspect: str | None, resolution: str | None, width: int, height: int):
    assert size_of(768, 512, aspect, resolution, LEGAL) == {"width": width, "height": height}


@pytest.mark.parametrize(
    ("duration", "fps", "frames"),
    [("5s", 24, 121), ("5", 24, 121), ("2.5s", 25, 65), ("0.1s", 24, 1), ("20s", 24, 481)],
)
def test_a_length_is_the_nearest_legal_number_of_frames(duration: str, fps: float, frames: int):
    assert frames_of(duration, fps, LEGAL) == frames


@pytest.mark.parametrize("text", ["16/9", "16:9:1", "-16:9", "wide", "16:0", "0:0", "1e5:1"])
def test_other_texts_are_refused_with_an_example(text: str):
    with pytest.raises(UsageError, match=re.escape(text)) as refusal:
        size_of(768, 512, text, None, LEGAL)
    assert refusal.value.hint == "for example: --aspect 16:9"
    with pytest.raises(UsageError, match=r"is not like 720p"):
        size_of(768, 512, None, text, LEGAL)
    with pytest.raises(UsageError, match=r"is not like 5s"):
        frames_of(text, 24, LEGAL)


def test_what_is_longer_than_any_clip_is_refused_with_the_longest():
    for aspect, resolution, nearest in (("100:1", "720p", "163p"), ("1000:1", None, "16p"), (None, "99999p", "10922p")):
        with pytest.raises(UsageError, match="at most 16384 are made") as refusal:
            size_of(768, 512, aspect, resolution, LEGAL)
        assert refusal.value.hint == f"nearest: --resolution {nearest}"
        size_of(768, 512, aspect, nearest, LEGAL)
    with pytest.raises(UsageError, match="is 86400 frames at 24 a second, at most 16385 are made") as refusal:
        frames_of("3600s", 24, LEGAL)
    assert refusal.value.hint == "nearest: --duration 682s"
