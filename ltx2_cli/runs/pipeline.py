"""The library by the names that diffusers has: `LTX2.from_pretrained(model)(prompt=...)`."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Self

import numpy as np
from PIL import Image

from ltx2_cli.core.components import Components
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import SILENT, run
from ltx2_cli.errors import UsageError
from ltx2_cli.estimate.fit import Request, check_fit, in_python, load
from ltx2_cli.parallel.devices import find_devices
from ltx2_cli.plan.resolve import resolve
from ltx2_cli.request.profiles import read_spec

SCALES = ("guidance_scale", "stg_scale", "modality_scale", "guidance_rescale")
ARGUMENTS = {  # of a request, by the arguments of diffusers' pipelines
    "prompt": "prompt",
    "negative_prompt": "negative_prompt",
    "height": "height",
    "width": "width",
    "num_frames": "num_frames",
    "frame_rate": "fps",
    "num_inference_steps": "num_inference_steps",
    "sigmas": "sigmas",
    "spatio_temporal_guidance_blocks": "stg_blocks",
    "num_videos_per_prompt": "num_videos",
    "max_sequence_length": "max_sequence_length",
    **{scale: f"guidance.video.{scale}" for scale in SCALES},
    **{f"audio_{scale}": f"guidance.audio.{scale}" for scale in SCALES},
}
OTHERS = ("generator", "image")
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")  # of PIL, that need no conversion


class LTX2Output(NamedTuple):
    """The clips of one call."""

    frames: np.ndarray  # uint8 [videos, frames, height, width, RGB]
    audio: np.ndarray  # float32 [videos, channels, samples] in -1 to 1
    fps: float
    sample_rate: int
    seed: int  # of the first video; the next has the next one


@dataclass
class LTX2:
    """A model that makes clips. `values` are keys of each request; networks that `keep_resident` keeps stay loaded."""

    values: Mapping[str, Any]
    report: Report = SILENT
    components: Components | None = field(default=None, repr=False)

    @classmethod
    def from_pretrained(cls, model: str, *, report: Report = SILENT, **values: object) -> Self:
        """A model by its profile, folder, file or repository. `values` are further keys of the request, such as
        `dtype="bfloat16"`, `sharding="trillium"`, `lora=("style.safetensors",)` or `keep_resident=True`. Nothing is
        read before the first call. Raises `UsageError` for unknown keys and wrong values."""
        read_spec({"model": model, "prompt": "a", **values})
        return cls({"model": model, **values}, report)

    def __call__(self, prompt: str, **arguments: object) -> LTX2Output:
        """Make the clips of a prompt. `arguments` are those of diffusers' LTX2Pipeline: sizes, steps, scales,
        `generator` (a seed, or a torch.Generator, of which the seed is read), and `image` (a path, or a PIL image), the
        first frame; what is left out or None is the model's. Raises `UsageError` for unknown arguments and wrong
        values, `DoesNotFitError` before anything is loaded."""
        with TemporaryDirectory() as folder:
            given = {"prompt": prompt, **arguments}
            plan = resolve(read_spec({**self.values, **_translated(given, Path(folder))}))
            if self.components is None:
                self.components = load(plan)
            else:
                check_fit(Request(plan.spec, find_devices()), plan, in_python)
                self.components.adopt(plan)
            media = [*run(plan, self.components, self.report)]
        frames, audio = (np.stack([getattr(clip, name) for clip in media]) for name in ("frames", "waveform"))
        return LTX2Output(frames, audio.swapaxes(1, 2), media[0].fps, media[0].sample_rate, plan.seeds[0])


def _translated(arguments: Mapping[str, object], folder: Path) -> dict[str, object]:
    """The keys of a request for arguments of diffusers; a PIL image is written into `folder`."""
    if unknown := sorted(arguments.keys() - {*ARGUMENTS, *OTHERS}):
        near = get_close_matches(unknown[0], [*ARGUMENTS, *OTHERS], 1)
        raise UsageError(
            f"`{unknown[0]}` is no argument of a call", f"nearest: {near[0]}" if near else ", ".join(ARGUMENTS)
        )
    values = {ARGUMENTS[name]: value for name, value in arguments.items() if name in ARGUMENTS and value is not None}
    if (generator := arguments.get("generator")) is not None:
        values["seed"] = _seed(generator)
    if (image := arguments.get("image")) is not None:
        values["conditions"] = [{"path": str(_image_file(image, folder))}]
    return values


def _seed(generator: Any) -> int:
    """The seed that is a generator, or that a torch.Generator was given."""
    if hasattr(generator, "initial_seed"):
        return int(generator.initial_seed())
    try:
        return operator.index(generator)
    except TypeError:
        raise UsageError("`generator` is neither a seed nor a torch.Generator", "for example: generator=7") from None


def _image_file(image: object, folder: Path) -> Path:
    """The path of an image; one of PIL is written into `folder`."""
    if isinstance(image, Image.Image):
        path = folder / "image.png"
        (image if image.mode in PNG_MODES else image.convert("RGB")).save(path)
        return path
    if isinstance(image, str | Path):
        return Path(image)
    raise UsageError("`image` is neither a path nor a PIL image", 'for example: image="red.png"')
