"""Read input images within limits, as upright sRGB; compress them like frames of the training videos; fit them to a
clip's frame."""

import hashlib
import math
import re
import warnings
from io import BytesIO
from pathlib import Path
from subprocess import run

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageCms, ImageFile, ImageOps, UnidentifiedImageError

from ltx2_cli.artifacts.files import read_limited
from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.media.ffmpeg import own_input, program
from ltx2_cli.media.videos import MAX_PIXELS, Video
from ltx2_cli.request.spelling import typed

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "AVIF")  # others run programs, or are no images
READABLE_IMAGES = f"an image: {', '.join(IMAGE_FORMATS)}"
MAX_IMAGE_BYTES = 2**28
MIN_H264_SIDE, MAX_H264_SIDE = 2, 2**14  # of H.264: a pixel of colour is 2x2
ORIENTATION = ExifTags.Base.Orientation
TURNED = {2: "mirrored", 4: "mirrored", 5: "mirrored and turned", 7: "mirrored and turned", 3: "turned", 6: "turned"}
TURNED |= {8: "turned"}  # by the orientation
WIDE_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")  # 16 bits a pixel, one channel
BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)

ImagePixels = NDArray[np.uint8]  # [height, width, RGB]


def read_image(path: Path) -> Video:
    """Read the image of a file, upright, in 8-bit sRGB. Raises `UsageError` for a file that is no image, damaged or
    huge; nothing is decoded before its size is known."""
    try:
        content = read_limited(path, MAX_IMAGE_BYTES, READABLE_IMAGES)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check the path") from None
    remarks: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(BytesIO(content), formats=IMAGE_FORMATS) as image:
                _check_size(path, image)
                remarks += [f"it has {frames} frames, the first is shown"] if (frames := _frames(image)) > 1 else []
                pixels = np.asarray(_as_rgb(image, content, remarks))
        except UnidentifiedImageError:
            raise UsageError(f"{path} is {'no image' if content else 'empty'}", READABLE_IMAGES) from None
        except BOMBS:
            raise _too_large(path, "far too many") from None
        except UsageError:
            raise
        except Exception as error:  # of a damaged file, decoders raise anything
            raise UsageError(f"{path} is damaged: {error}", "copy or make it again") from None
    return Video(path, hashlib.sha256(content).hexdigest(), pixels[None], tuple(remarks))


def is_image(path: Path) -> bool:
    """Whether a file begins like an image."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            with Image.open(path, formats=IMAGE_FORMATS):
                return True
        except Image.DecompressionBombError:
            return True
        except OSError:
            return False


def _frames(image: Image.Image) -> int:
    """Pillow counts those of formats alone that may have several."""
    return getattr(image, "n_frames", 1)


def _check_size(path: Path, image: Image.Image) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise _too_large(path, f"{image.width}x{image.height}")
    if min(image.size) < MIN_H264_SIDE:
        raise UsageError(f"{path} has {image.width}x{image.height} pixels", f"at least {MIN_H264_SIDE}x{MIN_H264_SIDE}")
    if (longer := max(image.size)) > MAX_H264_SIDE:
        width, height = (max(round(side * MAX_H264_SIDE / longer), MIN_H264_SIDE) for side in image.size)
        sentence = f"{path} has {image.width}x{image.height} pixels; a side has at most {MAX_H264_SIDE:,}"
        raise UsageError(sentence, f"scaled down: {width}x{height}; or its middle")


def _too_large(path: Path, pixels: str) -> UsageError:
    side = math.isqrt(MAX_PIXELS)
    return UsageError(f"{path} has {pixels} pixels; at most {MAX_PIXELS:,} are read", f"{side}x{side}, or smaller")


def _as_rgb(image: ImageFile.ImageFile, content: bytes, remarks: list[str]) -> Image.Image:
    """`image`, of a file of this content, in RGB; a change that is seen is added to `remarks`."""
    wide = re.search(r"\b(LA|RGBA?);16", str([tile.args for tile in image.tile]))
    orientation, profile = image.getexif().get(ORIENTATION), image.info.get("icc_profile")
    remarks += [f"it was {TURNED[orientation]} as its camera says"] if orientation in TURNED else []
    image.load()
    upright = _of_16_bits(image, content, wide[1], orientation) if wide else ImageOps.exif_transpose(image)
    remarks += ["its 16 bits became 8"] if wide or upright.mode in WIDE_MODES else []
    if upright.mode in WIDE_MODES:
        upright = Image.fromarray(_in_8_bits(np.clip(np.asarray(upright), 0, 65535)))
    elif upright.mode == "F":
        upright = Image.fromarray((np.clip(np.nan_to_num(np.asarray(upright)), 0, 1) * 255).round().astype(np.uint8))
        remarks += ["its light was cut off at 1"]
    elif upright.has_transparency_data:
        white = Image.new("RGBA", upright.size, "white")
        upright = Image.alpha_composite(white, upright.convert("RGBA"))
        remarks += ["transparent parts are shown on white"]
    return _in_srgb(upright, profile, remarks).convert("RGB")


def _of_16_bits(image: Image.Image, content: bytes, mode: str, orientation: int | None) -> Image.Image:
    """The image upright in 8 bits, rounded: of channels of 16 bits Pillow reads the high bytes alone."""
    form, channels = {"LA": ("ya16le", 2), "RGB": ("rgb48le", 3), "RGBA": ("rgba64le", 4)}[mode]
    source = own_input(f"{str(image.format).lower()}_pipe", None, "-noautorotate", "-frame_size", str(len(content)))
    values = np.frombuffer(_converted(source, content, ["-frames:v", "1", "-f", "rawvideo", "-pix_fmt", form]), "<u2")
    rounded = Image.fromarray(_in_8_bits(values.reshape(image.height, image.width, channels)), mode)
    rounded.getexif()[ORIENTATION] = orientation
    return ImageOps.exif_transpose(rounded)


def _in_8_bits(values: np.ndarray) -> NDArray[np.uint8]:
    return (values / 257).round().astype(np.uint8)


def _in_srgb(image: Image.Image, profile: bytes | None, remarks: list[str]) -> Image.Image:
    """`image` with the colours that its `profile` means, where it has one that can be used."""
    if profile is None or image.mode not in ("RGB", "RGBA", "CMYK", "L"):
        remarks += ["its CMYK became RGB without a colour profile"] if image.mode == "CMYK" else []
        return image
    try:
        source = ImageCms.ImageCmsProfile(BytesIO(profile))
        name = ImageCms.getProfileDescription(source).strip()
        if "srgb" in name.lower():
            return image
        opaque = image.convert("RGB") if image.mode == "RGBA" else image
        converted = ImageCms.profileToProfile(opaque, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (ImageCms.PyCMSError, OSError):
        remarks += ["its colour profile cannot be used"]
        return image
    assert converted is not None
    remarks += [f"its colours were converted from {name}"]
    return converted


def compressed(pixels: ImagePixels, crf: int) -> ImagePixels:
    """The image as one frame of H.264 at this constant rate factor has it: the model was trained on frames of videos,
    and takes an image without their traces for a still. 0: as it is. Odd sides lose a pixel. At one
    frame a second, as both published implementations: x264 spends more on a frame that lasts longer, 33 here
    is what 22 is in a video of 25 frames a second. Raises `RunError`."""
    if crf == 0:
        return pixels
    height, width = (side // 2 * 2 for side in pixels.shape[:2])
    frame = own_input("rawvideo", None, "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-framerate", "1")
    h264 = ["-f", "h264", "-c:v", "libx264", "-preset", "veryfast", "-crf", str(crf), "-pix_fmt", "yuv420p"]
    encoded = _converted(frame, pixels[:height, :width].tobytes(), h264)
    raw = _converted(own_input("h264", None), encoded, ["-f", "rawvideo", "-pix_fmt", "rgb24"])
    return np.frombuffer(raw, np.uint8).reshape(height, width, 3)


def _converted(source: list[str], data: bytes, target: list[str]) -> bytes:
    """Data of one format in another, by ffmpeg."""
    command = program(*source, "-sws_flags", "bilinear", *target, "-")
    done = run(command, input=data, capture_output=True, check=False)
    if done.returncode or not done.stdout:
        reason = done.stderr.decode(errors="replace").strip()
        raise RunError(
            f"ffmpeg cannot convert an image: {reason}", f"copy or make it again; or {typed('image_crf', 0)}"
        )
    return done.stdout


def covering(pixels: ImagePixels, height: int, width: int) -> NDArray[np.float32]:
    """The middle of an image, resized to cover a frame, [height, width, RGB] in [-1, 1]. Bilinear between centres of
    pixels, without smoothing before a reduction, as in both published implementations."""
    source = pixels.shape[:2]
    scale = max(height / source[0], width / source[1])
    resized: NDArray[np.float32] = pixels.astype(np.float32)
    for axis, length in enumerate((height, width)):
        whole = math.ceil(source[axis] * scale)
        places = np.arange(length) + (whole - length) // 2
        resized = _interpolated(resized, axis, (places + 0.5) * (source[axis] / whole) - 0.5)
    return resized / np.float32(127.5) - 1


def reduced(pixels: ImagePixels, height: int, width: int) -> NDArray[np.float32]:
    """As `covering`, but smoothed before a reduction, and rounded to whole pixels and 8 bits: references are often much
    larger than needed."""
    return resized(pixels, height, width).astype(np.float32) / np.float32(127.5) - 1


def resized(pixels: ImagePixels, height: int, width: int) -> ImagePixels:
    """The middle of an image, resized to cover a frame, [height, width, RGB]."""
    source_height, source_width = pixels.shape[:2]
    wider = source_width * height > source_height * width
    whole_width = source_width * height // source_height if wider else width
    whole_height = height if wider else source_height * width // source_width
    whole = np.asarray(Image.fromarray(pixels).resize((whole_width, whole_height), Image.Resampling.BILINEAR))
    top, left = whole_height // 2 - height // 2, whole_width // 2 - width // 2
    return whole[top : top + height, left : left + width]


def mean_light(frames: NDArray[np.uint8], latents: int, height: int, width: int) -> NDArray[np.float32]:
    """The mean light, 0 to 1, of a mask in the area of each latent, float32 [latents, height, width]. The mask's middle
    covers the frame. The first latent is of the first frame, the others of equal numbers of frames; an image is the
    same at all times."""
    _, source_height, source_width, _ = frames.shape
    scale = max(height / source_height, width / source_width)
    across, down = (source_width - width / scale) / 2, (source_height - height / scale) / 2
    box = (across, down, source_width - across, source_height - down)
    # A mean over the last axis takes eight times as long.
    sums = (np.add(frame[..., 0], frame[..., 1], dtype=np.float32) + frame[..., 2] for frame in frames)
    lights = (Image.fromarray(light).resize((width, height), Image.Resampling.BOX, box) for light in sums)
    cells = np.stack([np.asarray(light) for light in lights]) / (3 * 255)
    if len(frames) == 1:
        return np.repeat(cells, latents, axis=0)
    later = cells[1:].reshape(latents - 1, -1, height, width).mean(axis=1)
    return np.concatenate([cells[:1], later])


def _interpolated(x: NDArray[np.float32], axis: int, places: NDArray[np.float64]) -> NDArray[np.float32]:
    """x linearly between its entries along an axis; beyond the ends the last one."""
    places = np.clip(places, 0, x.shape[axis] - 1)
    below = places.astype(int)
    weight = np.expand_dims((places - below).astype(np.float32), (1, 2) if axis == 0 else (0, 2))
    above = np.minimum(below + 1, x.shape[axis] - 1)
    return x.take(below, axis) * (1 - weight) + x.take(above, axis) * weight
