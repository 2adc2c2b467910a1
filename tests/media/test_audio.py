"""Sounds are read from any file that has one, as they are, and within limits."""

from pathlib import Path

import numpy as np
import pytest

from ltx2_cli.errors import UsageError
from ltx2_cli.media import audio
from ltx2_cli.media.audio import read_audio
from media.test_videos import ffmpeg
from sounds import tone, write_tone

RATE, WAVE = 44100, tone(0.5, 44100)


@pytest.fixture(scope="module")
def wav(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tone(tmp_path_factory.mktemp("sounds") / "a.wav", WAVE, RATE)


@pytest.mark.parametrize("seconds", [0.2, 3.0])
def test_samples_are_those_of_the_file(wav: Path, seconds: float):
    read, samples = read_audio(wav, seconds), round(seconds * RATE)
    assert read.sample_rate == RATE
    kept = WAVE[:samples]
    np.testing.assert_array_equal(read.lasting(seconds), np.pad(kept, ((0, samples - len(kept)), (0, 0))))
    said = {0.2: "its first 0.20 s are heard", 3.0: "it lasts 0.50 s, silence follows it"}
    assert read.heard(seconds) == said[seconds]
    length = len(read.waveform) / RATE
    assert (read.heard(length), read.heard(length + 0.02)) == ("", f"it lasts {length:.2f} s, silence follows it")


@pytest.mark.parametrize("name", ["a.flac", "a.mp3", "a.mp4"])
def test_formats_are_told_by_their_content(wav: Path, tmp_path: Path, name: str):
    """A video's sound that begins later than its picture comes after silence."""
    late = ["-f", "lavfi", "-i", "color=s=64x64:d=0.6:r=10", "-itsoffset", "0.1"] if name == "a.mp4" else []
    ffmpeg(*late, "-i", wav, tmp_path / name)
    (tmp_path / name).rename(tmp_path / "named.wrongly")
    read = read_audio(tmp_path / "named.wrongly", 0.4)
    begin = round(0.1 * RATE) if late else 0
    part = slice(begin + 4410, begin + 13230)
    assert read.sample_rate == RATE
    assert np.abs(read.waveform[: max(begin - 2048, 0)]).max(initial=0) < 0.01
    assert np.abs(read.waveform[part] - WAVE[4410:13230]).max() < (1e-6 if name == "a.flac" else 0.08)


def test_one_channel_is_heard_on_both_sides_and_six_are_mixed(wav: Path, tmp_path: Path):
    mono = write_tone(tmp_path / "mono.wav", WAVE[:, :1], RATE)
    np.testing.assert_array_equal(read_audio(mono, 0.2).lasting(0.2), np.repeat(WAVE[:8820, :1], 2, axis=1))
    tones = "|".join(f"0.9*sin({99 * (channel + 1)}*t)" for channel in range(6))
    ffmpeg("-f", "lavfi", "-i", f"aevalsrc={tones}:c=5.1:s={RATE}:d=0.5", tmp_path / "six.wav")
    ffmpeg("-i", tmp_path / "six.wav", "-ac", 2, "-c:a", "pcm_s16le", tmp_path / "two.wav")
    six, two = (read_audio(tmp_path / name, 0.5) for name in ("six.wav", "two.wav"))
    assert six.heard(0.5) == "its 5.1 channels are mixed to 2"
    assert np.abs(six.waveform).max() < 1
    np.testing.assert_allclose(six.waveform, two.waveform, atol=2 / 2**15)


def refused(path: Path, seconds: float = 0.2) -> str:
    with pytest.raises(UsageError) as error:
        read_audio(path, seconds)
    return str(error.value).replace(str(path), "FILE")


def test_files_without_sound_are_refused(wav: Path, tmp_path: Path):
    contents = {"empty": b"", "text": b"hello", "cut": wav.read_bytes()[:47]}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    ffmpeg("-f", "lavfi", "-i", "color=s=64x64:d=0.1:r=10", tmp_path / "silent.mp4")
    ffmpeg("-i", wav, tmp_path / "a.flac")
    (tmp_path / "damaged").write_bytes((tmp_path / "a.flac").read_bytes()[:-900] + bytes(700))
    endings = {
        "empty": "FILE is empty",
        "text": "FILE is of no video or audio format",
        "silent.mp4": "FILE has no audio",
        "cut": "FILE is damaged: ",
        "damaged": "FILE is damaged: ",
        "absent": "FILE cannot be read: No such file or directory",
        "": "FILE is a folder, not a file",
    }
    for name, sentence in endings.items():
        assert refused(tmp_path / name, 0.5).startswith(sentence), name


def test_samples_that_are_no_numbers_are_refused(tmp_path: Path):
    samples = np.full(9000, np.nan, "<f4").tobytes()
    ffmpeg("-f", "f32le", "-ar", RATE, "-ac", 1, "-i", "-", "-c:a", "pcm_f32le", tmp_path / "nan.wav", data=samples)
    assert refused(tmp_path / "nan.wav") == "FILE has samples that are no numbers"


def test_no_more_is_read_than_fits(wav: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audio, "MAX_AUDIO_BYTES", 100_000)
    assert refused(wav, 0.21) == "0.21 s of FILE have 44100 samples a second, more than is read at once"
