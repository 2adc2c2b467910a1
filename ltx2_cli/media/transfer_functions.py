"""Transfer functions: between the numbers of a frame and linear light with BT.709 primaries."""

import numpy as np
from numpy.typing import NDArray

from ltx2_cli.media.clip import Frames

HLG_WHITE = 0.265  # linear light of diffuse white, which HLG shows at 75 % (ITU-R BT.2408)
# From primaries of BT.709 to those of BT.2020, rows for red, green and blue (ITU-R BT.2087)
TO_BT2020 = np.array(
    [[0.6274, 0.3293, 0.0433], [0.0691, 0.9195, 0.0114], [0.0164, 0.0880, 0.8956]],
    np.float32,
)

Light = NDArray[np.float32]  # linear, 1: diffuse white


def levels(frames: Frames) -> Light:
    """0 to 1 of frames of 8 or 16 bits."""
    return frames.astype(np.float32) / np.float32(255 if frames.dtype == np.uint8 else 65535)


def srgb_to_light(frames: Frames) -> Light:
    """Light of frames by the curve of sRGB (IEC 61966-2-1), 0 to 1."""
    level = levels(frames)
    return np.where(level <= 0.04045, level / 12.92, ((level + 0.055) / 1.055) ** np.float32(2.4))


def logc3_to_light(frames: Frames) -> Light:
    """Light of frames by ARRI's LogC3 at exposure index 800 (ARRI, "ALEXA Log C Curve, usage in VFX"), -0.02 to 55."""
    level = levels(frames)
    linear = (level - 0.092809) / 5.367655
    curved = (10 ** ((level - 0.385537) / np.float32(0.247190)) - 0.052272) / np.float32(5.555556)
    return np.where(level >= 5.367655 * 0.010591 + 0.092809, curved, linear)


def light_to_hlg(light: Light) -> NDArray[np.uint16]:
    """Frames of 16 bits in HLG with primaries of BT.2020 (ITU-R BT.2100). Light above 3.77 is cut off."""
    scene = np.clip(light @ TO_BT2020.T * HLG_WHITE, 0, 1)
    low, high = np.sqrt(3 * scene), 0.17883277 * np.log(np.maximum(12 * scene - 0.28466892, 1e-6)) + 0.55991073
    return np.round(np.where(scene <= 1 / 12, low, high) * 65535).clip(0, 65535).astype(np.uint16)
