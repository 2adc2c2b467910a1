"""What an mp4 says of itself comes back letter for letter; what it is, frame for frame; damage is a sentence."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ltx2_cli.errors import UsageError
from ltx2_cli.media import ffmpeg
from ltx2_cli.media.clip import Media
from ltx2_cli.media.probe import is_video, open_video
from ltx2_cli.media.write import write_mp4


def clip(frames: int = 17, fps: float = 24.0) -> Media:
    """Noise to see and to hear, 96x64."""
    draw = np.random.default_rng(0)
    samples = draw.uniform(-0.5, 0.5, (round(frames / fps * 24000), 2)).astype(np.float32)
    return Media(draw.integers(0, 255, (frames, 64, 96, 3), np.uint8), samples, fps, 24000)


@pytest.mark.parametrize(("frames", "fps"), [(17, 24.0), (9, 23.976), (25, 12.5), (1, 30.0)])
def test_sizes_and_rates_are_read_back(frames: int, fps: float, tmp_path: Path) -> None:
    path = tmp_path / "-i:%d.mp4"
    write_mp4(clip(frames, fps), path)
    video = open_video(path)
    assert is_video(path)
    assert (video.width, video.height, video.num_frames, video.fps) == (96, 64, frames, fps)
    assert video.seconds == pytest.approx(frames / fps)
    assert video.sample_rate == 24000
    assert video.metadata == {}


def test_clips_without_sound_are_read(tmp_path: Path) -> None:
    write_mp4(replace(clip(), waveform=clip().waveform[:0]), tmp_path / "clip.mp4", {"stage": "final"})
    video = open_video(tmp_path / "clip.mp4")
    assert (video.num_frames, video.sample_rate, video.metadata) == (17, None, {"stage": "final"})


@pytest.mark.parametrize(
    "text",
    ["a: 1\nb:\n- '☂ = ; # \\ \\\\'\n", "\n\n", "", "[section]\n;comment\nkey=value\n\\\n", "x" * 300_000],
    ids=["YAML", "lines", "nothing", "its own grammar", "more than a command line takes"],
)
def test_metadata_of_any_text_is_read_back_exactly(text: str, tmp_path: Path) -> None:
    about = {"record": text, "model_version": "ltx2"}
    write_mp4(clip(1), tmp_path / "clip.mp4", about)
    assert open_video(tmp_path / "clip.mp4").metadata == about


def boxes(content: bytes) -> list[str]:
    """The names of an mp4's boxes on one level."""
    names = []
    while content:
        size = int.from_bytes(content[:4], "big")
        names.append(content[4:8].decode())
        content = content[size:]
    return names


def test_metadata_is_stored_in_a_box_that_players_ignore(tmp_path: Path) -> None:
    """What plays the clip comes first, as it does without them, and nothing of theirs lies within it."""
    levels = []
    for name, about in (("bare.mp4", {}), ("said.mp4", {"record": "x" * 100})):
        write_mp4(clip(1), tmp_path / name, about)
        content = (tmp_path / name).read_bytes()
        outer, moov = boxes(content), content.index(b"moov") - 4
        inner = boxes(content[moov + 8 : moov + int.from_bytes(content[moov : moov + 4], "big")])
        levels.append((outer, inner))
    assert levels[0] == levels[1] == (["ftyp", "moov", "free", "mdat"], ["mvhd", "trak", "trak", "udta"])


def test_the_order_of_metadata_keys_makes_no_difference(tmp_path: Path) -> None:
    for name, keys in (("a.mp4", "abc"), ("b.mp4", "cab")):
        write_mp4(clip(1), tmp_path / name, {key: key for key in keys})
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_a_truncated_file_is_an_error_of_one_sentence(share: float, tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    write_mp4(clip(), path, {"record": "x"})
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(UsageError, match=rf"^{path} is damaged: [^\n]+$"):
        open_video(path)


@pytest.mark.parametrize("box", ["stsz", "stts", "stsc", "stsd", "trak", "ftyp"])
def test_a_box_with_a_false_size_is_an_error_of_one_sentence(box: str, tmp_path: Path) -> None:
    """A count, or a length, of four thousand million; no memory is taken for them."""
    path = tmp_path / "clip.mp4"
    write_mp4(clip(), path, {"record": "x"})
    content = bytearray(path.read_bytes())
    counts = {"stsz": 12, "trak": -4, "ftyp": -4}  # behind its name
    place = content.index(box.encode()) + counts.get(box, 8)
    content[place : place + 4] = b"\xff" * 4
    path.write_bytes(content)
    with pytest.raises(UsageError, match=rf"^{path} is damaged: [^\n]+$"):
        open_video(path)


def test_oversized_metadata_is_an_error_of_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mp4(clip(), tmp_path / "clip.mp4", {"record": "x" * 1000})
    monkeypatch.setattr(ffmpeg, "MAX_OUTPUT", 500)
    with pytest.raises(UsageError, match="says more of itself than 500 bytes"):
        open_video(tmp_path / "clip.mp4")
