"""How often the embedded model shows what held-out captions say: `python -m tools.train_demo.evaluate`.

A line for each way to ask for clips; every clip is written as an mp4 and measured from it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import typer

from ltx2_cli import load, read_spec, resolve, run
from ltx2_cli.media import write_mp4
from tools.train_demo.captions import caption
from tools.train_demo.measure import judge, measure_mp4
from tools.train_demo.world import Scene, draw_scene

SEED = 200
BOTH = ("video", "audio")
SCALES = {f"scale {scale}": {f"guidance.{each}.guidance_scale": float(scale) for each in BOTH} for scale in (1, 3, 6)}
VARIANTS: dict[str, Mapping[str, object]] = {
    "as it comes": {},
    **SCALES,
    "without STG": {f"guidance.{each}.stg_scale": 0.0 for each in BOTH},
    "without modality guidance": {f"guidance.{each}.modality_scale": 1.0 for each in BOTH},
    "bfloat16": {"dtype": "bfloat16", "text_encoder_dtype": "bfloat16"},
    "unrolled": {"scan_layers": False},
    "two stages": {"recipe": "two_stage", "height": 256, "width": 256},
}


def held_out(count: int) -> Iterator[tuple[Scene, str]]:
    """Scenes that were never trained on, and what says all of each."""
    for number in range(count):
        rng = np.random.default_rng([SEED, number])
        scene = draw_scene(rng, held_out=True)
        yield scene, caption(scene, rng, omit=0)


def figures(count: int, variant: Mapping[str, object], model: str = "demo") -> dict[str, float]:
    """The share of clips, of those that an attribute applies to, that show it; clip i is made from seed i."""
    asked = list(held_out(count))
    first = resolve(read_spec({"prompt": asked[0][1], "model": model, "seed": 0, "keep_resident": True} | variant))
    components, judged = load(first), []
    with TemporaryDirectory() as folder:
        for number, (scene, prompt) in enumerate(asked):
            spec = replace(first.spec, prompt=prompt, seed=(number,))
            (media,) = run(replace(first, spec=spec, prompts=(prompt, *first.prompts[1:])), components)
            clip = Path(folder) / "clip.mp4"
            write_mp4(media, clip)
            judged.append(judge(scene, measure_mp4(clip)))
    known = {key: [each[key] for each in judged if each[key] is not None] for key in judged[0]}
    return {key: round(float(np.mean(answers)), 3) if answers else float("nan") for key, answers in known.items()}


def main(
    count: Annotated[int, typer.Option(help="Of held-out captions, how many.")] = 200,
    model: Annotated[str, typer.Option(help="As of `ltx2 generate`.")] = "demo",
    variants: Annotated[str, typer.Option(help=f"Some of: {', '.join(VARIANTS)}.")] = ", ".join(VARIANTS),
) -> None:
    """Print a line of JSON a variant."""
    for name in variants.split(", "):
        print(json.dumps({"variant": name, "clips": count} | figures(count, VARIANTS[name], model)), flush=True)


if __name__ == "__main__":
    typer.run(main)
