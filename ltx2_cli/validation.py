"""What is wrong with a request by itself, before any checkpoint is looked at."""

import math
import re
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from os.path import expanduser
from pathlib import Path

from ltx2_cli.spec import RefinementSpec, RunSpec, SpecError

MAX_STEPS = 1000
MAX_VIDEOS = 1000
LEAST_STEP = 1e-6  # between noise levels, which float32 tells apart
MAX_FPS = 240
MAX_SIDE = 2**14  # pixels
MAX_FRAMES = 2**14 + 1
MAX_TOKENS = 2**17  # of text: what Gemma-3 reads
MAX_SEED = 2**32 - 1
SURROGATE = re.compile("[\ud800-\udfff]")  # how Python keeps a byte that is no UTF-8


def validate(spec: RunSpec) -> None:
    """Raise `SpecError` with everything that is wrong with `spec` by itself, a line each, and what to type instead."""
    findings = [*_wrong_text(spec), *_wrong_content(spec), *_wrong_process(spec), *_wrong_files(spec)]
    if findings:
        raise SpecError("\n".join(findings), "")


def _wrong_text(spec: RunSpec) -> Iterator[str]:
    for key, value in [*vars(spec).items(), *(("lora", lora) for lora in spec.lora)]:
        if isinstance(value, str) and "\0" in value:
            yield f"{key} {value!r} has a NUL in it; leave it out"
        if isinstance(value, str) and SURROGATE.search(value):
            yield f"{key} {value!r} is not text in UTF-8; type or save it as UTF-8"


def _wrong_content(spec: RunSpec) -> Iterator[str]:
    if not spec.prompt.strip():
        yield 'the prompt is empty; say what to show: --prompt "..."'
    yield from _off_grid("height", spec.height, 32, 0, MAX_SIDE)
    yield from _off_grid("width", spec.width, 32, 0, MAX_SIDE)
    yield from _off_grid("num_frames", spec.num_frames, 8, 1, MAX_FRAMES)
    yield from _beyond("fps", spec.fps, 1, MAX_FPS)
    yield from _beyond("num_videos", spec.num_videos, 1, MAX_VIDEOS)
    yield from _wrong_seeds(spec)


def _off_grid(key: str, value: int, step: int, first: int, most: int) -> Iterator[str]:
    """A finding if `value` is not a positive `k * step + first` up to `most`, with the nearest that are."""
    if value > most:
        yield f"{key} {value} is more than {most}; nearest: --{key.replace('_', '-')} {most}"
        return
    if value > 0 and value % step == first:
        return
    below = (value - first) // step * step + first
    nearest = [str(legal) for legal in (below, below + step) if legal > 0] or [str(first or step)]
    rule = f"8k + {first}" if first else f"a multiple of {step}"
    yield f"{key} {value} is not {rule}; nearest: --{key.replace('_', '-')} {' or '.join(nearest)}"


def _beyond(key: str, value: float, lowest: int, highest: int) -> Iterator[str]:
    """A finding if `value` is not between the two, with the nearest that is; of no number, the lowest."""
    if not lowest <= value <= highest:
        nearest = highest if value > highest else lowest
        yield f"{key} {value} is not in {lowest} to {highest}; nearest: --{key.replace('_', '-')} {nearest}"


def _wrong_seeds(spec: RunSpec) -> Iterator[str]:
    for seed in spec.seed or ():
        if not 0 <= seed <= MAX_SEED - max(spec.num_videos - 1, 0):
            yield f"seed {seed} is out of range, video i counts as seed + i; legal: --seed 0 to {MAX_SEED}"
    if spec.seed == ():
        yield "seed is a list of none; for example: --seed 7, or --seed 0..3"
    elif len(spec.seed or ()) * max(spec.num_videos, 0) > MAX_VIDEOS:
        yield f"{len(spec.seed or ())} seeds of {spec.num_videos} videos each are more than {MAX_VIDEOS} clips"
    elif len(set(spec.seeds)) < len(spec.seeds):
        twice = next(seed for place, seed in enumerate(spec.seeds) if seed in spec.seeds[:place])
        apart = "; video i counts as seed + i" * (spec.num_videos > 1)
        yield f"seed {twice} is there twice{apart}; for example: --seed 0..3 --num-videos 1"


def _wrong_process(spec: RunSpec) -> Iterator[str]:
    if spec.num_inference_steps is not None:
        yield from _beyond("num_inference_steps", spec.num_inference_steps, 1, MAX_STEPS)
    if spec.sigmas is not None:
        yield from _wrong_sigmas(spec.sigmas, spec.num_inference_steps)
    yield from _wrong_refinement(spec.refinement)
    for stream, prefix in (("video", "--"), ("audio", "--audio-")):
        for name, scale in asdict(spec.guidance)[stream].items():
            if scale is not None and not math.isfinite(scale):
                flag = prefix + name.replace("_", "-")
                yield f"guidance.{stream}.{name} {scale} is not a finite number; for example: {flag} 1"
    if min(spec.stg_blocks or (0,)) < 0:
        yield f"stg_blocks {list(spec.stg_blocks or ())} has a negative block; blocks count from 0: --stg-blocks 29"
    if spec.vae_memory is not None and not spec.vae_memory > 0:
        yield f"vae_memory {spec.vae_memory:g} is no number of GB; for example: --set vae_memory=8"
    if (rows := spec.sharding.tile_rows) is not None and rows < 1:
        yield f"sharding.tile_rows {rows} is no number of rows; --set sharding.tile_rows=null leaves it to the device"
    if spec.max_sequence_length < 1:
        yield f"max_sequence_length {spec.max_sequence_length} leaves no text; usual: --set max_sequence_length=1024"
    if spec.max_sequence_length > MAX_TOKENS:
        yield (
            f"max_sequence_length {spec.max_sequence_length} is more than {MAX_TOKENS};"
            " usual: --set max_sequence_length=1024"
        )


def _wrong_refinement(refinement: RefinementSpec) -> Iterator[str]:
    if refinement.sigmas:
        yield from _wrong_sigmas(refinement.sigmas, None, "refinement.sigmas", "[0.9, 0.7, 0.4, 0]")
    for name in ("adain", "tone_map"):
        if not 0 <= (share := vars(refinement)[name]) <= 1:
            yield f"refinement.{name} {share:g} is not in 0 to 1; nearest: --set refinement.{name}={int(share > 1)}"


def _wrong_sigmas(
    sigmas: tuple[float, ...], steps: int | None, key: str = "sigmas", good: str = "[1, 0.98, 0.9, 0.7, 0]"
) -> Iterator[str]:
    example = f"for example: --set '{key}={good}'"
    falling = all(level - after >= LEAST_STEP for level, after in pairwise(sigmas))
    if len(sigmas) < 2 or sigmas[0] > 1 or sigmas[-1] != 0 or not falling:
        yield f"{key} {list(sigmas)} do not fall from at most 1 to 0; {example}"
    elif len(sigmas) > MAX_STEPS + 1:
        yield f"{key} has {len(sigmas)} noise levels, at most {MAX_STEPS + 1} are; {example}"
    elif steps is not None and steps != len(sigmas) - 1:
        yield f"{key} has {len(sigmas)} noise levels, which is not {steps} steps but --steps {len(sigmas) - 1}"


def _wrong_files(spec: RunSpec) -> Iterator[str]:
    if "/" in (spec.model_name or ""):
        yield f"model_name {spec.model_name} begins file names and cannot hold a `/`; use -o to name the file"
    if spec.output is not None and Path(spec.output).suffix.lower() != ".mp4":
        yield f"output {spec.output!r} is not an mp4; name one: -o {Path(spec.output).stem or 'video'}.mp4"
    if spec.noise is not None and not Path(expanduser(spec.noise)).is_file():
        yield f"there is no noise file {spec.noise}; check the path after --noise"
    if spec.noise is not None and (videos := spec.num_videos * len(spec.seed or (0,))) > 1:
        yield f"a noise file starts one video, {videos} are asked for; nearest: --num-videos 1 and one --seed"
