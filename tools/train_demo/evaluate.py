"""How often the embedded model shows what held-out captions say: `python -m tools.train_demo.evaluate`.

A line for each way to ask for clips; every clip is written as an mp4 and measured from it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import typer

from ltx2_cli import load, read_spec, resolve, run
from ltx2_cli.media.clip import Media
from ltx2_cli.media.write import write_mp4
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.weights.digests import digests
from ltx2_cli.weights.hub import EMBEDDED, as_path
from tools.train_demo.arch import ARCH
from tools.train_demo.captions import Caption, caption
from tools.train_demo.evaluate_given import GIVEN, figures
from tools.train_demo.evaluate_segments import SEGMENTS, segment_figures
from tools.train_demo.joints import changes_of, joint_figures
from tools.train_demo.measure import Seen, measure_mp4, shares
from tools.train_demo.reconstruct import given_back
from tools.train_demo.world import Scene, draw_scene, plain

SEED = 200
OPEN = frozenset(("colour", "shape", "place"))  # what a caption that does not state it leaves open
BOTH = ("video", "audio")
SCALES = {f"scale {scale}": {f"guidance.{each}.guidance_scale": float(scale) for each in BOTH} for scale in (1, 3, 6)}
SHORT = "short prompts"
HALF = {"dtype": "bfloat16", "text_encoder_dtype": "bfloat16"}
VARIANTS: dict[str, Mapping[str, object]] = {
    "as it comes": {},
    **SCALES,
    "without STG": {f"guidance.{each}.stg_scale": 0.0 for each in BOTH},
    "without modality guidance": {f"guidance.{each}.modality_scale": 1.0 for each in BOTH},
    "bfloat16": HALF,
    "unrolled": {"scan_layers": False},
    "two stages": {"recipe": "two_stage"},
    SHORT: {},
}
NARROW = {  # their figures are in docs/devices.md
    f"{weights} {compute}": {**HALF, "weights": weights, "compute": compute}
    for weights in ("int8", "fp8", "int4")
    for compute in ("weights", "full")
}
OPTIONS: dict[str, Mapping[str, object]] = {
    "NAG": SCALES["scale 1"] | {"nag_scale": 11.0},
    "interval": {"guidance_interval": (0.2, 0.9)},
    "every other step": {"stg_every": 2, "modality_every": 2},
    "res_2s": {"sampler": "res_2s", "num_inference_steps": 10},
    "hq": {"recipe": "hq", "height": 256, "width": 256},
    "first-block cache 0.1": {"first_block_cache": 0.1},
    "first-block cache 0.2": {"first_block_cache": 0.2},
    "long": {"num_frames": 97},
    "long, in windows": {"num_frames": 97, "windows": 3},
}
ELSEWHERE = {"eight devices": {"sharding": "trillium"}}  # for machines that have so many


def held_out(count: int) -> Iterator[tuple[Scene, Caption]]:
    """Scenes that were never trained on, and what says all of each."""
    for number in range(count):
        rng = np.random.default_rng([SEED, number])
        scene = draw_scene(rng, held_out=True)
        yield scene, caption(scene, rng, omit=0)


def held_out_briefly(count: int) -> Iterator[tuple[Scene, Caption]]:
    """Scenes that were never trained on, each in three to five words."""
    for number in range(count):
        rng = np.random.default_rng([SEED + 1, number])
        scene = plain(draw_scene(rng, held_out=True))
        captions = (caption(scene, rng, omit=0.9, brief=True) for _ in iter(int, 1))
        yield scene, next(said for said in captions if 3 <= len(said.text.split()) <= 5)


def planned(prompt: str, seed: int, request: Mapping[str, object]) -> Plan:
    """The plan of a clip, otherwise asked for by `request`."""
    return resolve(read_spec({"prompt": prompt, "seed": seed, "model": "demo", "keep_resident": True, **request}))


def filmed(asked: Sequence[tuple[str, int]], request: Mapping[str, object]) -> Iterator[tuple[Seen, Media]]:
    """What is to be seen and heard in the clip of each prompt and seed, and the clip before it is written."""
    first = planned(*asked[0], request)
    components = load(first)
    with TemporaryDirectory() as folder:
        for prompt, seed in asked:
            spec = replace(first.spec, prompt=prompt, seed=(seed,))
            prompts = prompt, *first.prompts[1:]
            plan = replace(first, spec=spec, prompts=prompts, texts=((prompt,),), seeds=(seed,))
            (media,) = run(plan, components)
            clip = Path(folder) / "clip.mp4"
            write_mp4(media, clip)
            yield measure_mp4(clip), media


def main(
    count: Annotated[int, typer.Option(help="Of held-out captions, how many.")] = 200,
    checkpoint: Annotated[str, typer.Option(help="Its folder.")] = EMBEDDED,
    variants: Annotated[
        str,
        typer.Option(help=f"Some of: {'; '.join([*VARIANTS, *NARROW, *OPTIONS, *ELSEWHERE, *GIVEN, *SEGMENTS])}."),
    ] = "; ".join(VARIANTS),
) -> None:
    """Print a line of JSON of the autoencoders and the files, and one a variant; clip i is made from seed i."""
    files = sorted(as_path(checkpoint).rglob("*.safetensors"))
    print(json.dumps({"autoencoders": given_back(checkpoint, count), "files": digests(files)}), flush=True)
    for name in variants.split("; "):
        of_kind = figures if name in GIVEN else segment_figures if name in SEGMENTS else None
        shown = of_kind(name, count, {"checkpoint": checkpoint}) if of_kind else shown_of(name, count, checkpoint)
        print(json.dumps({"variant": name, "clips": count} | shown), flush=True)


def shown_of(name: str, count: int, checkpoint: str) -> dict[str, float]:
    """Of so many clips that are asked for in this way the share that shows each attribute of its prompt, and how wide
    edges are."""
    scenes, captions = zip(*(held_out_briefly if SHORT in name else held_out)(count), strict=True)
    request = {"checkpoint": checkpoint, **(VARIANTS | NARROW | OPTIONS | ELSEWHERE)[name]}
    asked = [(caption.text, seed) for seed, caption in enumerate(captions)]
    seen, changes = zip(*((each, changes_of(media.frames)) for each, media in filmed(asked, request)), strict=True)
    _, *later = planned(*asked[0], request).stages[0].windows
    joints = [(window.latents.video.start + window.overlap.video - 1) * ARCH.compression.frames for window in later]
    shown = shares(scenes, seen, [OPEN - caption.stated for caption in captions]) | edge_of(seen)
    return shown | (joint_figures(changes, joints) if joints else {})


def edge_of(seen: Sequence[Seen]) -> dict[str, float]:
    """How wide shapes' edges are on average, as a fraction of the frame's width."""
    return {"edge": round(float(np.nanmean([each.edge for each in seen])), 4)}


if __name__ == "__main__":
    typer.run(main)
