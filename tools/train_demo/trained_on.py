"""What a checkpoint tells of its training: `trained_on.json`."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np

from ltx2_cli.plan.remarks import TRAINED_ON_FILE
from tools.train_demo.captions import caption, words_of
from tools.train_demo.clips import TRAINING_CLIPS
from tools.train_demo.words import tokenizer
from tools.train_demo.world import FPS, NUM_FRAMES, Scene, draw_scene, plain

CAPTIONS = 40_000  # of each kind: enough to have every pair of words that is not rare


def write_trained_on(folder: Path, captions: int = CAPTIONS) -> None:
    """Write the sizes and the length of training clips, and which word came next to which in so many captions."""
    values = {
        "sizes": [f"{pixels}x{pixels}" for pixels in TRAINING_CLIPS],
        "num_frames": [NUM_FRAMES],
        "fps": [FPS],
        "next_words": next_words(captions),
    }
    (folder / TRAINED_ON_FILE).write_text(json.dumps(values, indent=1) + "\n")


def next_words(count: int) -> dict[str, str]:
    """Every word of so many captions of each kind, and those that come next to it, apart by spaces."""
    rng, found = np.random.default_rng(17), dict[str, set[str]]()
    for _ in range(count):
        for text in _captions(draw_scene(rng), rng):
            words = [word for word, _ in tokenizer().pre_tokenizer.pre_tokenize_str(text)]
            for word, following in pairwise([*words, ","]):
                found.setdefault(word, set()).add(following)
    return {word: " ".join(sorted(following - {","})) for word, following in sorted(found.items()) if word != ","}


def _captions(scene: Scene, rng: np.random.Generator) -> tuple[str, ...]:
    full, brief = caption(scene, rng, omit=0.1), caption(plain(scene), rng, omit=0.9, brief=True)
    return full.text, brief.text, words_of(scene, rng)
