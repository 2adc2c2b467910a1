"""What `ltx2 plan` says of clips on TPU slices: rows in plans.json, and their table in results.md.

    python -m benchmarks.plans [WORD...]    # make the rows that have all these words, as `v6e:2x4 ltx2.3`

A row is made again where the package or its configs were changed since. It needs libtpu, and minutes of two cores.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from ltx2_cli.files import replacing

FOLDER = Path(__file__).parent
ROWS, RESULTS = FOLDER / "plans.json", FOLDER / "results.md"
BEGIN = "<!-- of TPU slices: written by `make results` -->"
# Guidance that needs two passes: the prompt and the negative prompt. LTX-2.3 has the four of its recipe.
TWO_PASSES = ("--stg-scale=0", "--audio-stg-scale=0", "--modality-scale=1", "--audio-modality-scale=1")
GUIDANCE = {"ltx2": TWO_PASSES, "ltx2.3": ()}
SIZES = ("768x512", "1280x704", "1536x1024", "1920x1088")
SLICES = ("v6e:2x4", "tpu7x:2x2x1")
# M cycles of MaxDiffusion's best mesh by XLA's estimates, 2026-08-21.
PEER = {
    "ltx2 768x512 v6e:2x4": 306.6,
    "ltx2 768x512 tpu7x:2x2x1": 290.6,
    "ltx2.3 768x512 v6e:2x4": 680.2,
    "ltx2.3 768x512 tpu7x:2x2x1": 566.3,
}
COLUMNS = (
    *("clip", "mesh", "floor", "schedule", "to floor", "XLA", "to MaxDiffusion", "peak, GB", "temporaries, GB"),
    *("wire, GB", "compile, s", "load", "commit"),
)
HEADER = f"""{BEGIN}
## Clips on TPU slices

One forward over all passes of a 121-frame clip in bfloat16, compiled ahead of time for slices that are not here;
figures of one device, cycles in millions. Nothing was run. Floor: its arithmetic at the chip's rate. Schedule and XLA:
the two clocks of [`ltx2 plan`](../docs/plan.md), both without collectives. MaxDiffusion: its best mesh by XLA's clock,
head of 2026-08-21. Load: processes that wanted the two cores when the compiler began.

| {" | ".join(COLUMNS)} |
{"|---" * len(COLUMNS)}|
"""
Rows = dict[str, dict[str, Any]]  # by model, size and slice


def version() -> str:
    """The last commit that changed the package or its configs; `+`: they were changed since."""
    paths, git = ("--", "ltx2_cli", "configs"), ("git", "-C", FOLDER.parent)
    commit = subprocess.check_output([*git, "log", "-1", "--format=%h", *paths], text=True).strip()
    return commit + "+" * bool(subprocess.check_output([*git, "status", "--porcelain", *paths]))


def measure(name: str) -> dict[str, Any]:
    """What the plan of a row says. Raises `RuntimeError` where there is none."""
    model, size, slice_ = name.split()
    width, height = size.split("x")
    clip = (f"--model={model}", f"--width={width}", f"--height={height}", "--num-frames=121", *GUIDANCE[model])
    command = [sys.executable, "-m", "ltx2_cli", "plan", "--json", f"--topology={slice_}", *clip]
    commit, load = version(), os.getloadavg()[0]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    if not done.stdout or (said := json.loads(done.stdout))["cycles"] is None:
        raise RuntimeError(f"{name}: {done.stderr}")
    floor = said["roofline_seconds"]["compute"] * said["cycles"]["hertz"]
    kept = {key: said[key] for key in ("cycles", "memory", "sent_bytes", "compile_seconds")}
    return {"commit": commit, "load": load, "mesh": said["sharding"]["mesh"], "floor": floor, **kept}


def line(name: str, row: dict[str, Any]) -> str:
    """A row of the table."""
    scheduled, by_xla = sum(row["cycles"]["by_scope"].values()), row["cycles"]["by_xla"]
    mesh = " x ".join(f"{axis} {size}" for axis, size in row["mesh"].items() if size > 1)
    peer = f"{by_xla / 1e6 / PEER[name]:.2f}" if name in PEER else ""
    cycles = [f"{number / 1e6:.1f}" for number in (row["floor"], scheduled, by_xla)]
    ratio = f"{scheduled / row['floor']:.2f}"
    sizes = [row["memory"]["peak_bytes"], row["memory"]["temporaries_bytes"], row["sent_bytes"]]
    figures = [*cycles[:2], ratio, cycles[2], peer, *(f"{size / 1e9:.2f}" for size in sizes)]
    compiled = [f"{row['compile_seconds']:.0f}", f"{row['load']:.1f}", row["commit"]]
    return f"| {' | '.join([name, mesh, *figures, *compiled])} |\n"


def names() -> Iterator[str]:
    """All rows: model, size and slice."""
    return map(" ".join, ((model, size, slice_) for size, slice_, model in product(SIZES, SLICES, GUIDANCE)))


def read_rows() -> Rows:
    """The rows that were made."""
    return json.loads(ROWS.read_text()) if ROWS.exists() else {}


def write_results(measured: str) -> None:
    """Write the table behind what was measured."""
    rows = read_rows()
    table = HEADER + "".join(line(name, rows[name]) for name in names() if name in rows)
    with replacing(RESULTS) as temporary:
        temporary.write_text(measured.partition(BEGIN)[0] + table)


def main(words: list[str]) -> None:
    """Make the rows that have all of `words` and are missing or out of date; write the table after each."""
    for name in names():
        if {*words} <= {*name.split()} and read_rows().get(name, {}).get("commit") != version():
            row = measure(name)
            with replacing(ROWS) as temporary:
                temporary.write_text(json.dumps({**read_rows(), name: row}, indent=1) + "\n")
            write_results(RESULTS.read_text())
            print(line(name, row), end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
