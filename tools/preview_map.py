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

from ltx2_cli.core.preview import ColourMap
from ltx2_cli.diffusion.latents import open_latents
from ltx2_cli.media.videos import read_video

RIDGE = 1e-3  # of the mean variance of a channel, a token


def samples(clip: Path) -> tuple[np.ndarray, np.ndarray]:
    """The latents of a clip [tokens, channels], and the mean colours from 0 to 1 of what each stands for [tokens, RGB].
    The first latent frame is one frame of the clip; each other one as many as the autoencoder compresses."""
    file = open_latents(clip.with_suffix(".safetensors"))
    video = file.read().video[0]
    channels, times, height, width = video.shape
    assert file.fps
    pixels = read_video(clip, file.fps, file.size[0], from_end=False).frames
    rows, columns = pixels.shape[1] // height, pixels.shape[2] // width
    cells = pixels.reshape(len(pixels), height, rows, width, columns, 3).mean((2, 4)) / 255
    later = cells[1:].reshape(times - 1, -1, height, width, 3).mean(1)
    return video.reshape(channels, -1).T, np.concatenate([cells[:1], later]).reshape(-1, 3)


def fit(latents: np.ndarray, colours: np.ndarray) -> ColourMap:
    """Least squares with a little ridge."""
    mean, middle = latents.mean(0), colours.mean(0)
    centred = latents - mean
    ridge = RIDGE * len(latents) * centred.var(0).mean() * np.eye(latents.shape[1])
    weights = np.linalg.solve(centred.T @ centred + ridge, centred.T @ (colours - middle))
    return ColourMap(weights, middle - mean @ weights)


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
