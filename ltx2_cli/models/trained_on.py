"""The training data of a small model: `trained_on.json` in its folder. Published checkpoints have none."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from textwrap import shorten

from tokenizers import Tokenizer

from ltx2_cli.errors import UsageError
from ltx2_cli.weights.checkpoint import AGAIN, read_json

FILE = "trained_on.json"
WIDTH = 80  # characters of a list of words in a warning


@dataclass(frozen=True)
class TrainedOn:
    """The clips and the captions of a training."""

    sizes: tuple[str, ...]  # WIDTHxHEIGHT
    num_frames: tuple[int, ...]
    fps: tuple[float, ...]
    next_words: Mapping[str, frozenset[str]]  # every word, and those that came next to it in any caption


def read_trained_on(folder: Path) -> TrainedOn | None:
    """The file in a checkpoint's `folder`, None without one. Raises `UsageError` where it is damaged."""
    path = folder / FILE
    if not path.exists():
        return None
    values = read_json(path)
    try:
        next_words = {word: frozenset(following.split()) for word, following in values["next_words"].items()}
        sizes, num_frames = tuple(map(str, values["sizes"])), tuple(map(int, values["num_frames"]))
        return TrainedOn(sizes, num_frames, tuple(map(float, values["fps"])), next_words)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} does not list sizes, num_frames, fps and next_words: {error}", AGAIN) from None


def clip_warnings(trained_on: TrainedOn, sizes: list[tuple[int, int]], num_frames: int, fps: float) -> Iterator[str]:
    """A sentence for each way in which a clip differs from those of the training; `sizes` (width, height) of all
    stages, the first one first."""
    options = [f"--width {width} --height {height}" for width, height in (s.split("x") for s in trained_on.sizes)]
    untrained = [f"{width}x{height}" for width, height in sizes if f"{width}x{height}" not in trained_on.sizes]
    if untrained:
        stage = f", the size of the first stage: {options[-1]}" if len(sizes) > 1 else f": {options[0]}"
        yield f"the model was trained at {' and '.join(trained_on.sizes)} pixels, not at {untrained[0]}{stage}"
    if num_frames not in trained_on.num_frames:
        frames = trained_on.num_frames[0]
        yield f"the model was trained on clips of {frames} frames, not of {num_frames}: --num-frames {frames}"
    if fps not in trained_on.fps:
        rate = f"{trained_on.fps[0]:g}"
        yield f"the model was trained at {rate} frames a second, not at {fps:g}: --fps {rate}"


def prompt_warnings(trained_on: TrainedOn, tokenizer: Path, prompt: str) -> Iterator[str]:
    """A sentence for the words of a prompt that no caption had, and one for those that none had next to each other.
    `tokenizer` is the folder of the checkpoint's own, which says where a word begins and ends."""
    reader = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    words = [word for word, _ in reader.pre_tokenizer.pre_tokenize_str(reader.normalizer.normalize_str(prompt))]
    known = trained_on.next_words
    if unknown := [word for word in words if word not in known and word.isalnum()]:
        yield f"the model does not know {_listed(unknown)}"
    if prompt.strip() and not any(word.isalnum() for word in words):
        yield "the prompt has no word that the model knows"
    pairs = [(first, second) for first, second in pairwise(words) if first in known and second in known]
    if untrained := [f"`{first} {second}`" for first, second in pairs if second not in known[first]]:
        yield f"the model was not trained on {_listed(untrained)}: the clip may show something else"


def _listed(words: list[str]) -> str:
    return shorten(", ".join(dict.fromkeys(words)), WIDTH, placeholder=" …")
