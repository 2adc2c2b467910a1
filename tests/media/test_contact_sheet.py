"""Many clips on one picture."""

import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFont

from ltx2_cli.media.clip import Media
from ltx2_cli.media.contact_sheet import FONT_SIZE, _cut, write_contact_sheet

CLIP = Media(np.zeros((9, 64, 64, 3), np.uint8), np.zeros((0, 2), np.float32), 24.0, 24000)


def test_captions_are_cut_to_the_width():
    font = ImageFont.load_default(FONT_SIZE)
    text = "a fox yawns at dawn"
    width = int(font.getlength("a fox yawns…")) + 1
    assert _cut(text, width, font) == "a fox yawns…"
    assert _cut(text, 1000, font) == text
    assert _cut(text, 1, font) == "…"


@pytest.mark.parametrize("letter", ["i", "W", "雨"])
def test_long_prompts_take_no_time(letter: str, tmp_path: Path):
    began = time.process_time()
    write_contact_sheet([(f"{letter} " * 50_000, CLIP)] * 3, tmp_path / "sheet.png")
    assert time.process_time() - began < 1
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width == 6 * 70 + 6
