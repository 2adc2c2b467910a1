"""Many clips on one picture, to choose from: a row a clip, frames across, a caption above."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ltx2_cli.files import replacing
from ltx2_cli.media import Media

ACROSS = 6  # frames of a clip
LONGEST = 192  # pixels of a frame's longer side
GAP = 6  # pixels between frames
TEXT = 14  # pixels of a line
PAPER, INK = "white", "black"


@dataclass(frozen=True)
class Row:
    """What is shown of one clip."""

    caption: str
    images: Sequence[Image.Image]


def row(caption: str, clip: Media) -> Row:
    """A clip's first frame, its last, and those between them at equal distances, made small."""
    count = len(clip.frames)
    places = np.linspace(0, count - 1, min(ACROSS, count)).round().astype(int)
    images = [Image.fromarray(clip.frames[place]) for place in places]
    for image in images:
        image.thumbnail((LONGEST, LONGEST))
    return Row(" ".join(caption.split()), images)


def write_contact_sheet(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG, replacing what is there. Raises `RunError` with what the system says."""
    width = max(sum(image.width + GAP for image in clip.images) for clip in rows) + GAP
    line = TEXT + 2 * GAP
    heights = [line + clip.images[0].height for clip in rows]
    sheet = Image.new("RGB", (width, sum(heights) + GAP), PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(TEXT)
    top = 0
    for clip, height in zip(rows, heights, strict=True):
        draw.text((GAP, top + GAP), _fitting(clip.caption, width - 2 * GAP, font), INK, font)
        left = GAP
        for image in clip.images:
            sheet.paste(image, (left, top + line))
            left += image.width + GAP
        top += height
    with replacing(path) as temporary:
        sheet.save(temporary, "PNG")


def _fitting(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """As much of the text as there is room for."""
    shown = text[:width]  # no letter is narrower than a pixel
    if shown == text and font.getlength(text) <= width:
        return text
    kept = bisect_right(range(len(shown) + 1), width, key=lambda end: ceil(font.getlength(f"{shown[:end]}…"))) - 1
    return f"{shown[: max(kept, 0)]}…"
