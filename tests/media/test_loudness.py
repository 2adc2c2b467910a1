"""Loudness: measured as its definition has it, and reached without clipping."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from ltx2_cli.media.loudness import MOST_PEAK, file_loudness, loudness, normalise_loudness
from program import run_program
from sounds import write_tone

RATE = 48000


def sine(amplitude: float, seconds: float = 2.0) -> np.ndarray:
    """997 Hz on both channels: by BS.1770 as many LUFS as its amplitude has dB."""
    time = np.arange(round(seconds * RATE))[:, None] / RATE
    return (amplitude * np.sin(2 * np.pi * 997 * time)).repeat(2, axis=1).astype(np.float32)


def test_a_sine_has_the_loudness_of_its_definition(tmp_path: Path) -> None:
    for amplitude, decibels in ((0.1, -20.0), (0.01, -40.0)):
        assert loudness(sine(amplitude), RATE).integrated == pytest.approx(decibels, abs=0.1)
        assert loudness(sine(amplitude), RATE).peak == pytest.approx(decibels, abs=0.1)
    assert file_loudness(write_tone(tmp_path / "tone.wav", sine(0.1), RATE)).integrated == pytest.approx(-20, abs=0.1)


def test_one_gain_reaches_it_unless_it_would_clip() -> None:
    quiet = sine(0.1)
    louder, sentence = normalise_loudness(quiet, RATE, -14)
    assert not sentence
    assert loudness(louder, RATE).integrated == pytest.approx(-14, abs=0.1)
    np.testing.assert_allclose(louder / louder.max(), quiet / quiet.max(), atol=1e-6)
    quiet[1000] = 0.8  # a click, 2 dB below full scale
    limited, sentence = normalise_loudness(quiet, RATE, -14)
    assert re.fullmatch(r"the audio is at -1\d\.\d LUFS, not at -14: more would clip", sentence)
    assert loudness(limited, RATE).peak <= MOST_PEAK + 0.05


@pytest.mark.parametrize("waveform", [sine(0), sine(0.1, seconds=0.2)], ids=["silence", "0.2 s"])
def test_what_has_no_loudness_stays_as_it_is(waveform: np.ndarray) -> None:
    same, sentence = normalise_loudness(waveform, RATE, -14)
    np.testing.assert_array_equal(same, waveform)
    assert "has no loudness" in sentence


@pytest.mark.slow
def test_a_clip_has_the_loudness_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also the same latents, decoded again."""
    monkeypatch.chdir(tmp_path)
    size = ["--no-video", "--num-frames", "25", "--steps", "2", "--seed", "1"]
    asked = [
        "generate",
        "--model",
        "demo",
        "a loud high tone",
        *size,
        "--loudness",
        "-27",
        "--save-latents",
        "a.safetensors",
    ]
    assert run_program(monkeypatch, *asked, "-o", "a.wav") == 0
    assert run_program(monkeypatch, "decode", "a.safetensors", "-o", "b.wav") == 0
    capsys.readouterr()
    assert run_program(monkeypatch, "info", "--json", "a.wav", "b.wav") == 0
    for facts in json.loads(capsys.readouterr().out):
        assert facts["loudness"]["integrated"] == pytest.approx(-27, abs=0.1)
    assert run_program(monkeypatch, "info", "a.wav") == 0
    assert re.search(r"length +\d\.\d\d s at 48000 Hz, -2[67]\.\d LUFS, peak -\d+\.\d dB", capsys.readouterr().out)
