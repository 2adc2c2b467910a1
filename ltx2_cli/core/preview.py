"""A picture of a run while it denoises, without the decoder: the clean latents that its steps lead to, in colours by a
linear map.

Between noise levels a and b a loop moves its latents by (b - a) times the mean velocity; from where they are at b, the
clean ones lie b times that velocity back. A checkpoint's folder may hold the map of its latents to colours, as that of
the demo does (`python -m tools.preview_map` fits one). Otherwise the user's cache has one, fitted to the first clips
that the checkpoint made here. Before its first clip the colours are false: the principal components of the latents."""

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image

from ltx2_cli.artifacts.tensor_file import read_tensors, write_tensors
from ltx2_cli.core.report import Report
from ltx2_cli.core.state import RunState
from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.media.clip import Media
from ltx2_cli.media.contact_sheet import LONGER_SIDE, write_contact_sheet
from ltx2_cli.parallel.arrays import to_host
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import Stage
from ltx2_cli.request.profiles import user_cache
from ltx2_cli.weights.checkpoint import AGAIN, read_json

MAP_FILE = "preview.json"
UPDATES = 10  # pictures a stage, at most
SPREAD = 3.0  # standard deviations of a principal component from black to white
RIDGE = 1e-3  # of the mean variance of a channel, a token
FITTED = 8  # clips that a map is fitted to
FEW = 3  # clips; a map of fewer may be wrong about another: of the demo's three explain 88 %, one explains none
NO_SOUND = np.zeros((0, 2), np.float32)


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


def principal_components(tokens: np.ndarray) -> ColourMap:
    """The map of tokens [tokens, channels] to their first components, around grey; the largest entry of each is
    positive, so that colours do not flip from picture to picture."""
    mean = tokens.mean(0)
    values, vectors = np.linalg.eigh(np.cov((tokens - mean).T))
    axes = vectors[:, :-4:-1]
    axes = axes * np.sign(np.take_along_axis(axes, np.abs(axes).argmax(0)[None], 0))
    weights = axes / (2 * SPREAD * np.sqrt(np.maximum(values[:-4:-1], 1e-12)))
    return ColourMap(weights, 0.5 - mean @ weights)


@dataclass(frozen=True)
class Samples:
    """Sums over tokens and what they stand for, from which a map is fitted: they add up over clips."""

    gram: np.ndarray  # [channels + 1, channels + 1] of channels and a constant 1, with each other
    moments: np.ndarray  # [channels + 1, RGB]: of the same with colours from 0 to 1
    clips: int = 1

    def __add__(self, other: "Samples") -> "Samples":
        return Samples(self.gram + other.gram, self.moments + other.moments, self.clips + other.clips)

    def fit(self) -> ColourMap:
        """Least squares with a little ridge."""
        number, total, middle = self.gram[-1, -1], self.gram[-1, :-1], self.moments[-1] / self.gram[-1, -1]
        scatter = self.gram[:-1, :-1] - np.outer(total, total) / number
        ridge = RIDGE * np.trace(scatter) / len(scatter) * np.eye(len(scatter))
        weights = np.linalg.solve(scatter + ridge, self.moments[:-1] - np.outer(total, middle))
        return ColourMap(weights, middle - total / number @ weights)


def sampled(tokens: np.ndarray, colours: np.ndarray) -> Samples:
    """The sums over tokens [tokens, channels] and their colours [tokens, RGB]."""
    extended = np.column_stack([tokens, np.ones(len(tokens))]).astype(np.float64)
    return Samples(extended.T @ extended, extended.T @ colours)


def cell_colours(clip: np.ndarray, times: int, rows: int, columns: int) -> np.ndarray:
    """The mean colours from 0 to 1 of what each token of such a grid stands for [tokens, RGB], in a clip uint8 [frames,
    height, width, RGB]. The first latent frame is one frame of the clip; each other one as many as the autoencoder
    compresses."""
    _, height, width, _ = clip.shape
    cells = clip.reshape(len(clip), rows, height // rows, columns, width // columns, 3).mean((2, 4)) / 255
    later = cells[1:].reshape(times - 1, -1, rows, columns, 3).mean(1) if times > 1 else cells[1:]
    return np.concatenate([cells[:1], later]).reshape(-1, 3)


def learn_colours(plan: Plan, tokens: np.ndarray, clip: np.ndarray) -> None:
    """Fit the map of the plan's checkpoint also to a clip uint8 [frames, height, width, RGB] and the tokens [tokens,
    channels] that it was decoded from; not where the checkpoint has a map, enough clips were seen, or the clip is
    another's in part. What cannot be kept is not."""
    grid = plan.latent_shapes.video[2:]
    where, before = plan.checkpoint.where, read_samples(plan)
    whole = clip.shape[:3] == plan.arch.compression.clip_size(*grid)
    if not whole or (where / MAP_FILE).is_file() or (before and before.clips >= FITTED):
        return
    new = sampled(tokens, cell_colours(clip, *grid))
    total = before + new if before else new
    with suppress(RunError):
        arrays = {"gram": total.gram, "moments": total.moments}
        write_tensors(_samples_file(plan), arrays, {"clips": str(total.clips)})


def read_samples(plan: Plan) -> Samples | None:
    """What is known of the colours of the plan's checkpoint; None where nothing is, or the file is damaged."""
    path, width = _samples_file(plan), plan.latent_shapes.video[1] + 1
    if not path.is_file():
        return None
    with suppress(UsageError, KeyError, ValueError):
        tensors, metadata = read_tensors(path, "colours", "")
        found = Samples(tensors["gram"], tensors["moments"], int(metadata["clips"]))
        if (found.gram.shape, found.moments.shape) == ((width, width), (width, 3)):
            return found
    return None


def _samples_file(plan: Plan) -> Path:
    place = os.path.realpath(plan.checkpoint.where)
    return user_cache() / "colours" / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:16]}.safetensors"


@dataclass
class Preview:
    """An `OnProgress` that replaces a PNG at every tenth of a stage: a row of frames for each video of the batch. All
    hosts call it together; the first one writes, beside the next steps. A picture that is not finished when the next
    one is due takes its place; one that cannot be written is said once, and ends no run."""

    path: Path
    plan: Plan
    report: Report
    before: tuple[RunState, Any] = (RunState(), None)  # the state of the last picture or the beginning, and its tokens
    failure: RunError | None = None  # after which there are no more pictures
    colours: ColourMap | None = field(init=False)  # of the checkpoint; None: not known yet
    samples: Samples | None = field(init=False)  # that they are fitted to
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "preview"))
    picture: Future[None] | None = None  # that is being written

    def __post_init__(self) -> None:
        self.begin(self.plan)
        clips = self.samples.clips if self.samples else 0
        if clips < FEW and (self.samples or not self.colours):
            false = "may be false" if clips else "will be false"
            self.report.note(f"the colours in {self.path} {false}: clips that this model has made here: {clips}")

    def begin(self, plan: Plan) -> None:
        """From here on show the clips of this plan."""
        self.plan, self.before = plan, (RunState(), None)
        self.samples = read_samples(plan)
        known = read_colour_map(plan.checkpoint.where, plan.stages[0].shapes.video[1])
        self.colours = known or (self.samples.fit() if self.samples else None)

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
        busy = self.picture is not None and not self.picture.done()
        if new or jax.process_index() or (busy and not end):
            return
        self.wait()
        if self.failure is None:
            self.picture = self.pool.submit(self._write, last.step, tokens, progress, current)

    def wait(self) -> None:
        """Until the last picture is written."""
        try:
            if self.picture is not None:
                self.picture.result()
        except RunError as error:
            self.failure = error
            self.report.note(f"the run goes on without a preview: {error}")
        self.picture = None

    def _write(self, first: int, tokens: np.ndarray, progress: RunState, current: np.ndarray) -> None:
        """The picture of the way from the tokens after the step `first` to the current ones."""
        stage = self.plan.phases[progress.phase].stage
        clean = clean_latents(tokens, current, stage.sigmas[first], stage.sigmas[progress.step])
        seeds = self.plan.batches[progress.batch]
        step = f"stage {self.plan.phases[progress.phase].number + 1}, step {progress.step} of {stage.steps}"
        rows = (
            (f"seed {seed}, {step}", Media(frames(row, stage, self.colours), NO_SOUND, stage.geometry.fps, 1))
            for seed, row in zip(seeds, clean, strict=True)
        )
        write_contact_sheet(rows, self.path)


def clean_latents(before: np.ndarray, after: np.ndarray, first: float, last: float) -> np.ndarray:
    """Where latents are bound that went from the noise level `first` to `last`, on a straight line."""
    return after - last * (after - before) / (last - first)


def frames(tokens: np.ndarray, stage: Stage, colours: ColourMap | None) -> np.ndarray:
    """A video's tokens [tokens, channels] as frames uint8 [frames, height, width, RGB], enlarged to be looked at."""
    colours = colours or principal_components(tokens)
    levels = np.clip(tokens @ colours.weights + colours.bias, 0, 1) * 255
    small = levels.round().astype(np.uint8).reshape(*stage.shapes.video[2:], 3)
    height, width = small.shape[1:3]
    scale = LONGER_SIDE / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return np.stack([np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC)) for frame in small])
