"""An image of a run while it denoises, without the decoder: the clean latents that its steps lead to, in colours by a
linear map.

Between noise levels a and b a loop moves its latents by (b - a) times the mean velocity; from where they are at b, the
clean ones lie b times that velocity back. Where a sampler adds noise, they are estimated from the latents alone. The
folder of a checkpoint may hold a map of its latents to colours, as the demo's does. Without one the image is
grey: the first principal component of the latents."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image

from ltx2_cli.core.report import Report
from ltx2_cli.core.state import RunState
from ltx2_cli.diffusion.sampler import find_sampler
from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.media.clip import NO_AUDIO, Media
from ltx2_cli.media.contact_sheet import LONGER_SIDE, write_contact_sheet
from ltx2_cli.parallel.arrays import to_host
from ltx2_cli.plan.phases import phase_name
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import Stage
from ltx2_cli.weights.checkpoint import AGAIN, read_json

MAP_FILE = "preview.json"
UPDATES = 10  # images a stage, at most
SPREAD = 3.0  # standard deviations of the principal component from grey to white


@dataclass(frozen=True)
class ColourMap:
    """RGB from 0 to 1 of a token: its channels times `weights` [channels, RGB], plus `bias` [RGB]."""

    weights: np.ndarray
    bias: np.ndarray


def read_colour_map(folder: Path, channels: int) -> ColourMap | None:
    """The map in a checkpoint's folder, None without one. Raises `UsageError` where it is damaged."""
    path = folder / MAP_FILE
    if not path.is_file():
        return None
    values = read_json(path)
    try:
        arrays = [np.asarray(values[name], np.float32) for name in ("weights", "bias")]
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} holds no numbers as `weights` and `bias`: {error}", AGAIN) from None
    if [array.shape for array in arrays] != [(channels, 3), (3,)]:
        raise UsageError(f"{path} is not a map of {channels} channels to 3 colours", AGAIN)
    return ColourMap(*arrays)


def grey_map(tokens: np.ndarray) -> ColourMap:
    """The map of tokens [tokens, channels] to their first principal component, around grey. Its largest entry is
    positive, so that images do not invert from one to the next."""
    mean = tokens.mean(0)
    values, vectors = np.linalg.eigh(np.cov((tokens - mean).T))
    axis = vectors[:, -1:] * np.sign(vectors[np.abs(vectors[:, -1]).argmax(), -1])
    weights = np.repeat(axis / (2 * SPREAD * np.sqrt(max(values[-1], 1e-12))), 3, axis=1)
    return ColourMap(weights, 0.5 - mean @ weights)


@dataclass
class Preview:
    """An `OnProgress` that replaces a PNG at every tenth of a stage: a row of frames for each video of the batch. All
    hosts call it together; the first one writes, beside the next steps. An image that is not finished when the next
    one is due takes its place; one that cannot be written is noted once, and ends no run."""

    path: Path
    plan: Plan
    report: Report
    before: tuple[RunState, Any] = (RunState(), None)  # the state of the last image or the beginning, and its tokens
    failure: RunError | None = None  # after which there are no more images
    colours: ColourMap | None = field(init=False)  # of the checkpoint; None: grey
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "preview"))
    image: Future[None] | None = None  # being written

    def __post_init__(self) -> None:
        self.begin(self.plan)

    def begin(self, plan: Plan) -> None:
        """From here on show the clips of this plan."""
        self.plan, self.before = plan, (RunState(), None)
        self.colours = read_colour_map(plan.checkpoint.where, plan.stages[0].shapes.video[1])

    def __call__(self, progress: RunState) -> None:
        if progress.current is None:  # between stages
            self.wait()
            return
        stage, (last, tokens) = self.plan.phases[progress.phase].stage, self.before
        new = (last.phase, last.batch) != (progress.phase, progress.batch) or tokens is None
        end = progress.step == stage.steps
        if not (new or end) and progress.step - last.step < stage.steps / UPDATES:
            return
        video = progress.current.video
        host = video if isinstance(video, np.ndarray) else to_host(video)  # maybe the memory that the next step fills
        current = np.array(host[:, : stage.geometry.grid_tokens])
        self.before = progress, current
        busy = self.image is not None and not self.image.done()
        if new or jax.process_index() or (busy and not end):
            return
        self.wait()
        if self.failure is None:
            self.image = self.pool.submit(self._write, last.step, tokens, progress, current)

    def wait(self) -> None:
        """Wait until the last image is written."""
        try:
            if self.image is not None:
                self.image.result()
        except RunError as error:
            self.failure = error
            self.report.note(f"the run goes on without a preview: {error}")
        self.image = None

    def _write(self, first: int, tokens: np.ndarray, progress: RunState, current: np.ndarray) -> None:
        """Write the image of the way from the tokens after the step `first` to the current ones."""
        stage = self.plan.phases[progress.phase].stage
        level = stage.sigmas[progress.step]
        if find_sampler(stage.sampler).draws and stage.eta:
            clean = expected_latents(current, level)
        else:
            clean = clean_latents(tokens, current, stage.sigmas[first], level)
        seeds = self.plan.batches[progress.batch]
        step = f"{phase_name(self.plan.phases[progress.phase])}, step {progress.step} of {stage.steps}"
        rows = (
            (f"seed {seed}, {step}", Media(frames(row, stage, self.colours), NO_AUDIO, stage.geometry.fps, 1))
            for seed, row in zip(seeds, clean, strict=True)
        )
        write_contact_sheet(rows, self.path)


def clean_latents(before: np.ndarray, after: np.ndarray, first: float, last: float) -> np.ndarray:
    """Clean latents: the end of the straight line through those at the noise levels `first` and `last`."""
    return after - last * (after - before) / (last - first)


def expected_latents(tokens: np.ndarray, level: float) -> np.ndarray:
    """The expected clean latents of noisy ones, both of unit spread, where fresh noise leaves no straight line."""
    return tokens * (1 - level) / ((1 - level) ** 2 + level**2)


def frames(tokens: np.ndarray, stage: Stage, colours: ColourMap | None) -> np.ndarray:
    """A video's tokens [tokens, channels] as frames uint8 [frames, height, width, RGB], enlarged to be looked at."""
    colours = colours or grey_map(tokens)
    levels = np.clip(tokens @ colours.weights + colours.bias, 0, 1) * 255
    small = levels.round().astype(np.uint8).reshape(*stage.shapes.video[2:], 3)
    height, width = small.shape[1:3]
    scale = LONGER_SIDE / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return np.stack([np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC)) for frame in small])
