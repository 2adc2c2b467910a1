"""What `ltx2 plan` says of real clips on real TPU slices: a row for each model, size and number of passes.

Needs the extra `tpu` and, for the whole table, ten minutes of two cores.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

SLICES = ("tpu7x:2x2x1", "v6e:2x4")
# Guidance that needs two passes: the prompt and the negative prompt.
TWO_PASSES = ("--stg-scale=0", "--audio-stg-scale=0", "--modality-scale=1", "--audio-modality-scale=1")
FIGURES = ("arguments, GB", "temporaries, GB", "peak, GB", "wire, GB", "step, s", "compile, s")
COLUMNS = ("slice", "model", "size", "passes", "mesh", *FIGURES)


@dataclass(frozen=True)
class Clip:
    """What is planned; all four passes are the recipe's."""

    model: str
    width: int
    height: int
    passes: int


CLIPS = (
    Clip("ltx2", 768, 512, 2),
    Clip("ltx2", 1280, 768, 2),
    Clip("ltx2", 1536, 1024, 2),
    Clip("ltx2.3", 768, 512, 2),
    Clip("ltx2.3", 768, 512, 4),
    Clip("ltx2.3", 1280, 768, 4),
    Clip("ltx2.3", 1536, 1024, 4),
)


def lines() -> Iterator[str]:
    """The table in Markdown."""
    yield "One forward over all passes of a 121-frame clip in bfloat16, compiled ahead of time; figures of one device."
    yield "The step is the least that the chip's published rates allow; nothing was run."
    if find_spec("libtpu") is None:
        yield "Left out: it needs libtpu, `pip install 'ltx2[tpu]'`."
        return
    yield from ("", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|")
    yield from (row(slice_, clip) for slice_ in SLICES for clip in CLIPS)


def row(slice_: str, clip: Clip) -> str:
    """One clip on one slice."""
    size = (f"--width={clip.width}", f"--height={clip.height}", "--num-frames=121")
    command = [
        sys.executable,
        "-m",
        "ltx2_cli",
        "plan",
        "--json",
        f"--model={clip.model}",
        f"--topology={slice_}",
        *size,
    ]
    done = subprocess.run([*command, *TWO_PASSES * (clip.passes == 2)], capture_output=True, check=False, text=True)
    name = f"| {slice_} | {clip.model} | {clip.width}x{clip.height} | {clip.passes}"
    if not done.stdout:
        return f"{name} | {done.stderr.strip().splitlines()[-1]} |"
    said = json.loads(done.stdout)
    mesh = " x ".join(f"{axis} {count}" for axis, count in said["sharding"]["mesh"].items() if count > 1)
    memory = [said["memory"][f"{part}_bytes"] / 1e9 for part in ("arguments", "temporaries", "peak")]
    figures = [f"{value:.2f}" for value in (*memory, said["wire_bytes"] / 1e9)]
    seconds = f"{said['seconds_per_step']:.3f} | {said['compile_seconds']:.0f}"
    return f"{name} | {mesh} | {' | '.join(figures)} | {seconds} |" + " does not fit" * (done.returncode == 3)


if __name__ == "__main__":
    for line in lines():
        print(line, flush=True)
