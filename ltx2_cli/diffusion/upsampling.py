"""What upsampling makes of a clip's size, and of which clip a size is made."""

from collections.abc import Callable
from dataclasses import dataclass

from ltx2_cli.diffusion.geometry import Compression
from ltx2_cli.spec import SpecError


@dataclass(frozen=True)
class Upsampling:
    """How latents are resampled: `time` for each one along time, but for the first, which stands alone; `up` for each
    one in height and in width, of which every `down`-th is kept."""

    time: int
    up: int
    down: int

    def frames(self, latents: int) -> int:
        """How many latents along time are made of so many."""
        return self.time * (latents - 1) + 1

    def side(self, latents: int) -> int:
        """How many latents in height or width are made of so many; what is left over of a cell counts as one."""
        return -(-latents * self.up // self.down)


def source_size(
    num_frames: int, height: int, width: int, by: Upsampling, compression: Compression
) -> tuple[int, int, int]:
    """Frames, height and width of the clip of which one of this size is made, all in frames and pixels.

    Raises `SpecError` with the nearest size that can be made where this one cannot.
    """

    def along_time(latents: int) -> int:
        return (latents - 1) * compression.frames + 1

    def along_side(latents: int) -> int:
        return latents * compression.pixels

    found = [
        _nearest(num_frames, along_time, by.frames),
        _nearest(height, along_side, by.side),
        _nearest(width, along_side, by.side),
    ]
    (_, frames_made), (_, height_made), (_, width_made) = found
    if (frames_made, height_made, width_made) != (num_frames, height, width):
        raise SpecError(
            f"no clip is upsampled to {width}x{height}x{num_frames}: latents are made {by.time} for each one in time,"
            f" and {by.up / by.down:g} in height and width",
            f"the nearest is --width {width_made} --height {height_made} --num-frames {frames_made}",
        )
    (frames, _), (rows, _), (columns, _) = found
    return frames, rows, columns


def _nearest(wanted: int, size: Callable[[int], int], made: Callable[[int], int]) -> tuple[int, int]:
    """A size, and the one made of it that is nearest to `wanted`; the smaller of two. Both grow with the latents."""
    latents = 1
    while size(made(latents + 1)) <= wanted:
        latents += 1
    nearest = min(latents, latents + 1, key=lambda latents: abs(size(made(latents)) - wanted))
    return size(nearest), size(made(nearest))
