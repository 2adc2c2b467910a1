"""The map of a model's latents to colours, for `ltx2 generate --preview`, fitted to clips and their saved latents.

`python -m tools.preview_map CLIP.mp4 ... -o FOLDER/preview.json` finds the latents of each clip beside it, under its
name, as `ltx2 generate -o CLIP.mp4 --save-latents CLIP.safetensors` writes them. FOLDER is that of the checkpoint. It
prints what share of the variance of a clip's colours a map of the other clips explains.
"""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from ltx2_cli.core.preview import ColourMap, cell_colours, sampled
from ltx2_cli.diffusion.latents import open_latents
from ltx2_cli.media.videos import read_video


def samples(clip: Path) -> tuple[np.ndarray, np.ndarray]:
    """The latents of a clip [tokens, channels], and the mean colours of what each stands for [tokens, RGB]."""
    file = open_latents(clip.with_suffix(".safetensors"))
    video = file.read().video[0]
    channels, times, height, width = video.shape
    assert file.fps
    pixels = read_video(clip, file.fps, file.size[0], from_end=False).frames
    return video.reshape(channels, -1).T, cell_colours(pixels, times, height, width)


def fit(latents: np.ndarray, colours: np.ndarray) -> ColourMap:
    """The map of latents to colours."""
    return sampled(latents, colours).fit()


def explained(clips: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """The share of the variance of all colours that maps explain, each fitted without the clip that it colours."""
    middle, error, total = np.concatenate([colours for _, colours in clips]).mean(0), 0.0, 0.0
    for number, (latents, colours) in enumerate(clips):
        others = clips[:number] + clips[number + 1 :]
        found = fit(*(np.concatenate(arrays) for arrays in zip(*others, strict=True)))
        error += float(np.square(colours - (latents @ found.weights + found.bias)).sum())
        total += float(np.square(colours - middle).sum())
    return 1 - error / total


def main(
    clips: Annotated[list[Path], typer.Argument(help="At least two mp4, each with its latents beside it.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The map.")],
) -> None:
    """Fit and write the map."""
    pairs = [samples(clip) for clip in clips]
    print(f"maps without a clip explain {explained(pairs):.1%} of the variance of its colours")
    found = fit(*(np.concatenate(arrays) for arrays in zip(*pairs, strict=True)))
    values = {name: np.round(array, 5).tolist() for name, array in vars(found).items()}
    output.write_text(json.dumps(values) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
