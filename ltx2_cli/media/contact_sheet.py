"""Contact sheet of several clips: one row of frames per clip, with a caption above."""

from bisect import bisect_right
from collections.abc import Iterable
from math import ceil
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from ltx2_cli.artifacts.files import replacing
from ltx2_cli.media.clip import Media

FRAMES_PER_CLIP = 6
LONGER_SIDE = 192  # of a frame, in pixels
GAP = 6  # pixels between frames
FONT_SIZE = 14  # pixels
SOFTWARE, NAME = "Software", "ltx2 contact sheet"  # a text of the PNG
DESCRIPTION_KEY = "Description"  # a text that says what is on the sheet
BACKGROUND, TEXT_COLOUR = "white", "black"


def write_contact_sheet(clips: Iterable[tuple[str, Media]], path: Path, content: str = "") -> None:
    """Write a PNG of captions and clips, replacing an existing file; with a text on its `content`. Raises `RunError`
    where it cannot be written."""
    rows = [(" ".join(caption.split()), _thumbnails(clip)) for caption, clip in clips]
    width = max(sum(image.width + GAP for image in images) for _, images in rows) + GAP
    line = FONT_SIZE + 2 * GAP
    sheet = Image.new("RGB", (width, sum(line + images[0].height for _, images in rows) + GAP), BACKGROUND)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(FONT_SIZE)
    top = 0
    for caption, images in rows:
        draw.text((GAP, top + GAP), _cut(caption, width - 2 * GAP, font), TEXT_COLOUR, font)
        left = GAP
        for image in images:
            sheet.paste(image, (left, top + line))
            left += image.width + GAP
        top += line + images[0].height
    mark = PngInfo()
    mark.add_text(SOFTWARE, NAME)
    mark.add_text(DESCRIPTION_KEY, content)
    with replacing(path) as temporary:
        sheet.save(temporary, "PNG", pnginfo=mark)


def is_contact_sheet(path: Path) -> bool:
    """Whether `write_contact_sheet` made a file."""
    return sheet_content(path) is not None


def sheet_content(path: Path) -> str | None:
    """The text on the content of a contact sheet; None for another file."""
    try:
        with Image.open(path) as image:
            return str(image.info.get(DESCRIPTION_KEY, "")) if image.info.get(SOFTWARE) == NAME else None
    except OSError:
        return None


def _thumbnails(clip: Media) -> list[Image.Image]:
    """Evenly spaced frames of a clip, the first and the last among them, scaled down."""
    count = len(clip.frames)
    indices = np.linspace(0, count - 1, min(FRAMES_PER_CLIP, count)).round().astype(int)
    images = [Image.fromarray(clip.frames[index]) for index in indices]
    for image in images:
        image.thumbnail((LONGER_SIDE, LONGER_SIDE))
    return images


def _cut(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """The text, cut to a width in pixels."""
    shown = text[:width]  # no letter is narrower than a pixel
    if shown == text and font.getlength(text) <= width:
        return text
    kept = bisect_right(range(len(shown) + 1), width, key=lambda end: ceil(font.getlength(f"{shown[:end]}…"))) - 1
    return f"{shown[: max(kept, 0)]}…"
