"""Pictures are read upright, in sRGB, within limits, and laid over a frame as the reference does."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from ltx2_cli.errors import UsageError
from ltx2_cli.media.images import MAX_PIXELS, compressed, covering, is_image, mean_light, read_image
from media.test_videos import ffmpeg

RED, GREEN = (250, 20, 10), (10, 200, 30)


def smooth(height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 9), np.cos(y / 7), np.sin((x + y) / 11)]
    return np.stack(127 + 100 * np.array(waves), -1).astype(np.uint8)


@pytest.fixture
def red(tmp_path: Path) -> Path:
    """Left half red, right half green."""
    pixels = np.full((20, 40, 3), RED, np.uint8)
    pixels[:, 20:] = GREEN
    Image.fromarray(pixels).save(tmp_path / "red.png")
    return tmp_path / "red.png"


def test_a_picture_keeps_its_pixels_and_says_nothing(red: Path):
    picture = read_image(red)
    assert picture.frames.shape == (1, 20, 40, 3)
    assert picture.frames[0][0, 0].tolist() == [*RED]
    assert picture.remarks == ()
    assert len(picture.sha256) == 64


@pytest.mark.parametrize("name", ["turned.png", "turned.tiff", "deep.png"])
@pytest.mark.parametrize(
    ("orientation", "word", "upright"),
    [
        (1, None, lambda pixels: pixels),
        (2, "mirrored", np.fliplr),
        (3, "turned", lambda pixels: np.rot90(pixels, 2)),
        (4, "mirrored", np.flipud),
        (5, "mirrored and turned", lambda pixels: pixels.swapaxes(0, 1)),
        (6, "turned", lambda pixels: np.rot90(pixels, -1)),
        (7, "mirrored and turned", lambda pixels: np.rot90(pixels, 2).swapaxes(0, 1)),
        (8, "turned", np.rot90),
    ],
)
def test_exif_turns_it_upright(tmp_path: Path, name: str, orientation: int, word: str | None, upright):
    """A square too, which has the same size afterwards."""
    exif, pixels = Image.Exif(), np.random.default_rng(0).integers(0, 256, (6, 6, 3), np.uint8)
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / name, exif=exif)
    if name == "deep.png":
        whole = (tmp_path / name).read_bytes()
        chunk = whole[whole.index(b"eXIf") - 4 :].partition(b"IDAT")[0][:-4] if orientation > 1 else b""
        wide = (pixels * np.uint16(257)).tobytes()
        ffmpeg("-f", "rawvideo", "-pix_fmt", "rgb48le", "-s", "6x6", "-i", "-", tmp_path / "wide.png", data=wide)
        head, _, rest = (tmp_path / "wide.png").read_bytes().partition(b"IDAT")
        (tmp_path / name).write_bytes(head[:-4] + chunk + head[-4:] + b"IDAT" + rest)
    picture = read_image(tmp_path / name)
    np.testing.assert_array_equal(picture.frames[0], upright(pixels))
    said = [f"it was {word} as its camera says"] * (word is not None)
    assert picture.remarks == (*said, *["its 16 bits became 8"] * (name == "deep.png"))


@pytest.mark.parametrize(
    ("name", "kind", "channels"),
    [
        ("a.png", "rgb48le", 3),
        ("a.png", "rgba64le", 4),
        ("a.png", "ya16le", 2),
        ("a.png", "gray16le", 1),
        ("a.tiff", "rgb48le", 3),
    ],
)
def test_sixteen_bits_are_rounded(tmp_path: Path, name: str, kind: str, channels: int):
    """Every level is as likely as any other; all is opaque."""
    levels = np.random.default_rng(0).integers(0, 2**16, (9, 12, channels)).astype("<u2")
    if channels in (2, 4):
        levels[..., -1] = 2**16 - 1
    source = ["-f", "rawvideo", "-pix_fmt", kind, "-s", "12x9", "-i", "-"]
    ffmpeg(*source, "-frames:v", 1, tmp_path / name, data=levels.tobytes())
    picture = read_image(tmp_path / name)
    seen = (levels / 257).round()[..., : 3 if channels > 2 else 1]
    np.testing.assert_array_equal(picture.frames[0], np.broadcast_to(seen, (9, 12, 3)))
    assert picture.remarks[0] == "its 16 bits became 8"


def wide(values: np.ndarray) -> Image.Image:
    return Image.fromarray(values)


UNPROFILED = "its CMYK became RGB without a colour profile"


@pytest.mark.parametrize(
    ("name", "image", "pixel", "remark"),
    [
        ("a.png", Image.new("RGBA", (4, 4), (0, 0, 0, 0)), (255, 255, 255), "transparent parts are shown on white"),
        ("b.png", Image.new("RGBA", (4, 4), (*RED, 255)), RED, "transparent parts are shown on white"),
        ("c.png", wide(np.full((4, 4), 51400, np.uint16)), (200, 200, 200), "its 16 bits became 8"),
        ("d.tiff", wide(np.full((4, 4), 2.0, np.float32)), (255, 255, 255), "its light was cut off at 1"),
        ("e.tiff", wide(np.full((4, 4), np.nan, np.float32)), (0, 0, 0), "its light was cut off at 1"),
        ("f.tiff", Image.new("CMYK", (4, 4), (0, 255, 255, 0)), (255, 0, 0), UNPROFILED),
        ("g.gif", Image.new("P", (4, 4), 0), (0, 0, 0), None),
        ("h.png", Image.new("L", (4, 4), 9), (9, 9, 9), None),
        ("i.bmp", Image.new("1", (4, 4), 1), (255, 255, 255), None),
    ],
)
def test_every_kind_of_pixel_becomes_rgb(tmp_path: Path, name, image, pixel, remark):
    image.save(tmp_path / name)
    picture = read_image(tmp_path / name)
    assert picture.frames[0].shape == (4, 4, 3)
    assert picture.frames[0][1, 1].tolist() == [*pixel]
    assert picture.remarks == ((remark,) if remark else ())


def test_the_first_of_several_frames_is_shown(tmp_path: Path):
    frames = [Image.new("RGB", (8, 8), color) for color in (RED, GREEN)]
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], lossless=True)
    picture = read_image(tmp_path / "a.webp")
    assert picture.frames[0][0, 0].tolist() == [*RED]
    assert picture.remarks == ("it has 2 frames, the first is shown",)


def test_colours_are_those_that_the_profile_means(tmp_path: Path):
    """A profile whose red and blue are exchanged: what it calls red is blue."""
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    count = struct.unpack(">I", srgb[128:132])[0]
    entries = {srgb[132 + 12 * i : 136 + 12 * i]: 132 + 12 * i for i in range(count)}
    swapped = bytearray(srgb.replace("sRGB".encode("utf-16-be"), "Swap".encode("utf-16-be")))
    red, blue = entries[b"rXYZ"], entries[b"bXYZ"]
    swapped[red + 4 : red + 12], swapped[blue + 4 : blue + 12] = srgb[blue + 4 : blue + 12], srgb[red + 4 : red + 12]
    for name, profile in (("swapped", bytes(swapped)), ("srgb", srgb), ("broken", b"no profile")):
        Image.new("RGB", (4, 4), (255, 0, 0)).save(tmp_path / f"{name}.png", icc_profile=profile)
    swapped_picture, plain, broken = (read_image(tmp_path / f"{name}.png") for name in ("swapped", "srgb", "broken"))
    assert swapped_picture.frames[0][0, 0].tolist() == [0, 0, 255]
    assert "its colours were converted from Swap" in swapped_picture.remarks[0]
    assert (plain.frames[0][0, 0].tolist(), plain.remarks) == ([255, 0, 0], ())
    assert (broken.frames[0][0, 0].tolist(), broken.remarks) == ([255, 0, 0], ("its colour profile cannot be used",))


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header says this size, without pixels."""
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b"")))
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)  # fmt: skip


def as_png(image: Image.Image) -> bytes:
    image.save(file := io.BytesIO(), "PNG")
    return file.getvalue()


NOISY = as_png(Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)))
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "p.png is empty"),
        (b"no image at all", "p.png is no image"),
        (EPS, "p.png is no image"),
        (NOISY[: len(NOISY) // 2], "p.png is damaged: "),
        (bomb(9000, 9000), f"p.png has 9000x9000 pixels; at most {MAX_PIXELS:,} are read"),
        (bomb(10**5, 10**5), "p.png has far too many pixels"),
        (bomb(1, 50), "p.png has 1x50 pixels"),
        (bomb(20, 20000), "p.png has 20x20000 pixels; a side has at most 16,384"),
    ],
)
def test_what_is_no_picture_is_refused_in_a_sentence(tmp_path: Path, content: bytes, sentence: str):
    (tmp_path / "p.png").write_bytes(content)
    with pytest.raises(UsageError, match=r"^[^\n]*$") as refused:
        read_image(tmp_path / "p.png")
    assert sentence in str(refused.value)


def test_folders_and_absent_files_are_refused(tmp_path: Path):
    for path, sentence in ((tmp_path, "is a folder"), (tmp_path / "absent.png", "No such file")):
        with pytest.raises(UsageError, match=sentence):
            read_image(path)


@pytest.mark.parametrize("size", [(32, 64), (96, 64), (64, 37), (50, 33), (20, 200), (7, 5)])
def test_a_frame_is_covered_as_in_the_reference(size: tuple[int, int]):
    """The resizing and cropping of `LTX2ConditionPipeline.preprocess_conditions`."""
    pixels, height, width = smooth(*size), 64, 96
    scale = max(height / size[0], width / size[1])
    whole = [int(np.ceil(side * scale)) for side in size]
    channels_first = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
    resized = torch.nn.functional.interpolate(channels_first, size=whole, mode="bilinear", align_corners=False)[0]
    top, left = (whole[0] - height) // 2, (whole[1] - width) // 2
    wanted = resized[:, top : top + height, left : left + width].permute(1, 2, 0) / 127.5 - 1
    got = covering(pixels, height, width)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, wanted, atol=2e-5)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ((64, 96), ""),
        ((128, 192), ""),
        ((1024, 1024), "it is 1024x1024, its middle 1024x683 fills the frame"),
        ((100, 400), "it is 400x100, its middle 150x100 fills the frame"),
    ],
)
def test_what_is_cropped_is_said(tmp_path: Path, size: tuple[int, int], words: str):
    Image.new("RGB", size[::-1]).save(tmp_path / "p.png")
    assert read_image(tmp_path / "p.png").cropped(64, 96) == words


@pytest.mark.parametrize(
    ("crf", "error", "red"),
    [
        (18, 3.695, [[156, 85, 173, 74], [156, 78, 170, 65], [154, 78, 169, 66], [156, 79, 165, 64]]),
        (33, 5.300, [[160, 88, 176, 77], [149, 83, 167, 70], [149, 75, 165, 73], [153, 79, 167, 65]]),
        (51, 11.319, [[147, 97, 162, 66], [147, 75, 175, 67], [149, 100, 145, 71], [152, 95, 171, 76]]),
    ],
)
def test_compression_leaves_the_traces_of_the_reference(crf: int, error: float, red: list[list[int]]):
    """Those of diffusers' `apply_image_conditioning_crf` with PyAV 18.1.0; other versions of x264 differ by a little.
    At 25 frames a second, as videos have, the errors would be 1.3, 1.6 and 1.2 times as large."""
    pixels = smooth(64, 96)
    got = compressed(pixels, crf)
    assert np.abs(got.astype(int) - pixels).mean() == pytest.approx(error, rel=0.02)
    np.testing.assert_allclose(got[4::19, 3::29, 0], red, atol=3)
    np.testing.assert_array_equal(compressed(pixels, 0), pixels)


def test_compression_crops_odd_sides():
    assert compressed(smooth(33, 47), 33).shape == (32, 46, 3)
    assert compressed(smooth(2, 3), 33).shape == (2, 2, 3)


def test_a_mask_is_averaged_over_what_a_latent_covers():
    """Its middle, as that of the reference: of 8x12 the 8x8. A picture is of all times."""
    frames = np.zeros((9, 8, 12, 3), np.uint8)
    frames[0, :4, 2:6], frames[1:3, :, 6:10], frames[:, :, :2] = 255, 51, 200
    wanted = [[[1, 0], [0, 0]], [[0, 0.05], [0, 0.05]]]
    np.testing.assert_allclose(mean_light(frames, 2, 2, 2), wanted, atol=1e-7)
    np.testing.assert_allclose(mean_light(frames[:1], 3, 2, 2), [wanted[0]] * 3, atol=1e-7)


@pytest.mark.parametrize(("name", "found"), [("p.png", True), ("v.mov", False)])
def test_pictures_are_known_by_how_they_begin(tmp_path: Path, name: str, found: bool):
    path = tmp_path / name
    path.write_bytes(b"no picture")
    if name == "p.png":
        Image.new("L", (2, 2)).save(path)
    assert is_image(path) is found
