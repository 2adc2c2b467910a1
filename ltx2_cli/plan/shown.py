"""Where a stage shows the pictures, videos and references of a request."""

from typing import NamedTuple

from ltx2_cli.diffusion.geometry import ReferenceGrid, ReferenceScale, VAECompression
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.validation import SHOWN


class ShownPicture(NamedTuple):
    """Where a stage shows a picture or a video of the plan, or that it follows one."""

    number: int  # of the picture in the plan
    frame: float  # of the stage's clip, where it begins; 0: in place of its first latents, else behind its grid
    strength: float
    num_frames: int
    reference: ReferenceGrid | None = None  # behind all that is shown

    @property
    def behind(self) -> bool:
        """Whether its tokens lie behind the grid."""
        return bool(self.frame or self.reference)

    def keyframes(self, compression: int) -> list[tuple[float, float]]:
        """The frames of the clip between which each of its latents lies, if these are behind the grid. That of a single
        frame lasts as long."""
        if not self.frame:
            return []
        latents, length = (self.num_frames - 1) // compression + 1, compression if self.num_frames > 1 else 1
        return [(self.frame + compression * i, self.frame + compression * i + length) for i in range(latents)]


def follows_by_shares(spec: RunSpec) -> bool:
    """Whether a clip and its references attend to each other less than to themselves."""
    kinds = {condition.kind for condition in spec.conditions}
    return "reference" in kinds and (spec.reference_strength < 1 or "mask" in kinds)


def shown_pictures(
    spec: RunSpec, compression: VAECompression, num_frames: int, last: bool = False
) -> tuple[ShownPicture, ...]:
    """Where a stage of so many frames shows the pictures: at the moments of the clip that is asked for. Behind them the
    references, which the `last` of two stages has not."""
    rate, shown = (num_frames - 1) / max(spec.num_frames - 1, 1), list[ShownPicture]()
    references = list[ShownPicture]()
    for number, condition in enumerate(spec.conditions):
        frame, count = condition.frame, condition.num_frames or 1
        if condition.kind == "reference" and not last:
            scale = ReferenceScale(condition.downscale or 1, condition.temporal_scale or 1)
            grid = ReferenceGrid(compression.latents(count), scale)
            references.append(ShownPicture(number, 0, condition.strength, count, grid))
        elif condition.kind in SHOWN:
            start = frame if frame >= 0 else max(spec.num_frames + frame - count + 1, 0)
            shown.append(ShownPicture(number, start * rate, condition.strength, count))
    return (*shown, *references)
