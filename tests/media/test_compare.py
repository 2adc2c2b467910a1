"""Two clips: the same bytes in each stream, or by how much they differ, as ffmpeg measures it."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ltx2_cli.errors import UsageError
from ltx2_cli.media.clip import Media
from ltx2_cli.media.compare import video_differences
from ltx2_cli.media.write import write_mp4


def clip(grey: int, loudness: float, frames: int = 9, width: int = 96) -> Media:
    """A grey wall and a tone."""
    picture = np.full((frames, 64, width, 3), grey, np.uint8)
    tone = np.sin(np.arange(9000) / 20)[:, None].repeat(2, 1)
    return Media(picture, (loudness * tone).astype(np.float32), 24.0, 24000)


@pytest.fixture
def then(tmp_path: Path) -> Path:
    write_mp4(clip(100, 0.5), tmp_path / "then.mp4", {"record": "a"})
    return tmp_path / "then.mp4"


@pytest.fixture
def now(tmp_path: Path) -> Path:
    return tmp_path / "now.mp4"


def test_metadata_makes_no_difference(then: Path, now: Path) -> None:
    write_mp4(clip(100, 0.5), now, {"record": "another"})
    assert then.read_bytes() != now.read_bytes()
    assert video_differences(then, now) == {}


def test_a_different_picture_is_measured(then: Path, now: Path) -> None:
    """Luma, two thirds of the numbers, goes from 102 to 110: 20·log10(255 / 8) + 10·log10(3 / 2) = 31.83 dB."""
    write_mp4(clip(110, 0.5), now)
    differences = video_differences(then, now)
    assert differences.keys() == {"video"}
    psnr, ssim = re.fullmatch(r"PSNR ([\d.]+) dB, SSIM ([\d.]+)", differences["video"]).groups()
    assert float(psnr) == pytest.approx(31.83, abs=0.01)
    assert 0.9 < float(ssim) < 1


def test_a_different_sound_is_measured(then: Path, now: Path) -> None:
    """By a tenth of itself: 20 dB below it."""
    write_mp4(clip(100, 0.45), now)
    differences = video_differences(then, now)
    assert differences.keys() == {"audio"}
    assert float(re.fullmatch(r"SDR ([\d.]+) dB", differences["audio"])[1]) == pytest.approx(20, abs=1)


def test_other_lengths_and_sample_rates_are_named_not_measured(then: Path, now: Path) -> None:
    write_mp4(replace(clip(100, 0.5, 17), sample_rate=48000), now)
    assert video_differences(then, now) == {
        "video": "96x64, 17 frames, not 96x64, 9 frames",
        "audio": "48000 Hz, not 24000 Hz",
    }


def test_different_sizes_and_missing_sound_are_named(then: Path, now: Path) -> None:
    silent = clip(100, 0.5, 17, 128)
    write_mp4(replace(silent, waveform=silent.waveform[:0]), now)
    assert video_differences(then, now) == {
        "video": "128x64, 17 frames, not 96x64, 9 frames",
        "audio": "none, not 24000 Hz",
    }


def test_a_truncated_clip_is_refused(then: Path, now: Path) -> None:
    now.write_bytes(then.read_bytes()[: then.stat().st_size // 2])
    with pytest.raises(UsageError, match=r"now\.mp4 is damaged"):
        video_differences(then, now)
