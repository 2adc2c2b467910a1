"""What `ltx2 plan` says of clips on TPU slices: rows in plans.json, and their tables in results.md.

    python -m benchmarks.plans [WORD...]    # make the rows that have all these words, as `v6e:2x4 ltx2.3 768x512`

Rows of the size `networks` are of those beside the denoiser, as the recipe of two stages uses them.

A row is made again where the package or its configs were changed since. It needs libtpu, and minutes of two cores.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax

from ltx2_cli import read_spec
from ltx2_cli.artifacts.files import replacing
from ltx2_cli.chips import chip
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import programs
from ltx2_cli.estimate.compiled import Compiled, compile_program
from ltx2_cli.estimate.cycles import dumped_schedules
from ltx2_cli.estimate.estimate import compile_and_estimate, forward_programs, record
from ltx2_cli.estimate.flops import decoding_flops, diffusion_decoder_flops
from ltx2_cli.estimate.offline import topology
from ltx2_cli.plan.pixel_tiles import PixelTiles
from ltx2_cli.plan.resolve import Plan, plan_offline

FOLDER = Path(__file__).parent
ROWS, RESULTS = FOLDER / "plans.json", FOLDER / "results.md"
BEGIN = "<!-- of TPU slices: written by `make results` -->"
# Guidance that needs two passes: the prompt and the negative prompt. LTX-2.3 has the four of its recipe, and so has the
# dev recipe of LTX-2.5; its usual one, distilled, has one pass.
TWO_PASSES: dict[str, object] = {
    f"guidance.{stream}.{scale}": value
    for stream in ("video", "audio")
    for scale, value in (("stg_scale", 0), ("modality_scale", 1))
}
GUIDANCE: dict[str, dict[str, object]] = {"ltx2": TWO_PASSES, "ltx2.3": {}, "ltx2.5": {"recipe": "one_stage"}}
NETWORKS = "networks"
PHASES = {"text encoder": "encode", "connectors": "connect", "upsample": "upsample"}  # each is one program
PROGRAMS = (*PHASES, "frames", "audio")
TILES, TILED = "diffusion-decoder", ("features", "frames")  # of the whole clip, and of a tile on each device
OTHERS = {NETWORKS: PROGRAMS, TILES: TILED}  # the programs of rows that are not of the denoiser
SIZES = ("768x512", "1280x704", "1536x1024", "1920x1088")
SLICES = ("v6e:2x4", "tpu7x:2x2x1")
EIGHT_BITS = tuple(  # rows whose denoiser multiplies in eight bits
    f"ltx2.3 768x512 {slice_}" for slice_ in ("v6e:2x4 int8", "tpu7x:2x2x1 fp8", "v5e:2x4 int8")
)
# M cycles of MaxDiffusion's best mesh by XLA's estimates, 2026-08-21.
PEER = {
    "ltx2 768x512 v6e:2x4": 306.6,
    "ltx2 768x512 tpu7x:2x2x1": 290.6,
    "ltx2.3 768x512 v6e:2x4": 680.2,
    "ltx2.3 768x512 tpu7x:2x2x1": 566.3,
}
COLUMNS = (
    *("clip", "passes", "mesh", "floor", "schedule", "to floor", "XLA", "to MaxDiffusion", "peak, GB"),
    *("temporaries, GB", "wire, GB", "wire, ms", "waits, ms", "compile, s", "load", "commit"),
)
HEADER = f"""{BEGIN}
## Clips on TPU slices

One forward over all passes of a 121-frame clip in bfloat16, or with `--compute full` in the eight bits that a row
names, compiled ahead of time for slices that are not here; figures of one device, cycles in millions. Nothing was run.
Floor: its arithmetic at the chip's rate. Schedule and XLA: the two clocks of [`ltx2 plan`](../docs/plan.md), both
without collectives; wire: what these send, at the published rate of the links that they cross; waits: how long
arithmetic waits for it in the order of the schedule, in rows without a figure all of the time. MaxDiffusion: its best
mesh by XLA's clock, head of 2026-08-21. Compile: as a run does it, without the dump that a plan reads. Load: processes
that wanted the two cores when that began.

| {" | ".join(COLUMNS)} |
{"|---" * len(COLUMNS)}|
"""
NETWORK_COLUMNS = (
    *("of", "network", "least", "schedule", "to least", "XLA", "ms", "peak, GB", "temporaries, GB"),
    *("compile and dump, s", "load", "commit"),
)
NETWORKS_HEADER = f"""
Networks beside the denoiser, for a clip of two stages, 384x256 and 768x512; cycles as above. Least: those of their
arithmetic at the chip's rate for bfloat16, or of reading their weights. Vocoders multiply in float32, of which a
product takes six of bfloat16. Frames by diffusion are those of one tile on each device.

| {" | ".join(NETWORK_COLUMNS)} |
{"|---" * len(NETWORK_COLUMNS)}|
"""
Rows = dict[str, dict[str, Any]]  # by name


def version() -> str:
    """The last commit that changed the package or its configs; `+`: they were changed since."""
    paths, git = ("--", "ltx2_cli", "configs"), ("git", "-C", FOLDER.parent)
    commit = subprocess.check_output([*git, "log", "-1", "--format=%h", *paths], text=True).strip()
    return commit + "+" * bool(subprocess.check_output([*git, "status", "--porcelain", *paths]))


def plan_of(name: str) -> Plan:
    """The plan of a row, for devices that are described."""
    model, size, slice_, *rounded = name.split()
    jax.config.update("jax_platforms", "cpu")
    keys: dict[str, object] = {"prompt": "a", "model": model, "num_frames": 121}
    keys |= {"weights": rounded[0], "compute": "full"} if rounded else {}
    if size in OTHERS:
        keys |= {"recipe": "two_stage", "width": 768, "height": 512}
        keys |= {"decoder": "diffusion"} if size == TILES else {}
    else:
        width, height = map(int, size.split("x"))
        keys |= {"width": width, "height": height, **GUIDANCE[model]}
    return plan_offline(read_spec(keys), topology(slice_))


def planned(name: str) -> dict[str, Any]:
    """What the plan of a row says. Raises `RuntimeError` where libtpu writes no schedule."""
    with dumped_schedules():
        plan, size = plan_of(name), name.split()[1]
        others = [program for program in programs(plan) if program.name in OTHERS.get(size, ())]
        said = record(compile_and_estimate(plan, others or forward_programs(plan), Report()))
    if size in OTHERS:
        said["least_seconds"] = least_seconds(plan, said["phase_seconds"])
    if said["refused"] or not all(program["cycles"] for program in said["programs"].values()):
        raise RuntimeError(f"{name}: {said['refused'] or 'libtpu writes no schedule'}")
    return said


def least_seconds(plan: Plan, phase_seconds: dict[str, float]) -> dict[str, float]:
    """The least time of each program of the networks beside the denoiser."""
    device = chip(plan.sharding.mesh.devices.flat[0].device_kind)
    assert device
    if decoder := plan.networks.diffusion_decoder:
        _, _, frames, height, width = plan.latent_shapes.video
        tiles = plan.decoding.tiles
        assert isinstance(tiles, PixelTiles)
        whole, tile = diffusion_decoder_flops(decoder, tiles, (frames, height, width))
        return dict(zip(TILED, (whole / device.flops, tile / device.flops), strict=True))
    decoding = [flops / device.flops for flops in decoding_flops(plan)]
    return dict(zip(PROGRAMS, [*(phase_seconds[phase] for phase in PHASES.values()), *decoding], strict=True))


def compile_seconds(name: str) -> float:
    """Seconds in which the forward of a row compiles where nothing is dumped."""
    plan = plan_of(name)
    (compiled,) = (compile_program(program, plan.sharding.mesh) for program in forward_programs(plan))
    assert isinstance(compiled, Compiled)
    return compiled.compile_seconds


def alone(function: Callable[[str], Any], name: str) -> Any:
    """The function's result in a process of its own: libtpu reads its flags once."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, name).result()


def measure(name: str) -> dict[str, Any]:
    """The row of this name."""
    row: dict[str, Any] = {"commit": version(), "load": os.getloadavg()[0]}
    if name.split()[1] in OTHERS:
        said, kept = alone(planned, name), ("cycles", "memory", "compile_seconds")
        figures = {network: {key: program[key] for key in kept} for network, program in said["programs"].items()}
        return {**row, "programs": figures, "least_seconds": said["least_seconds"]}
    row["compile_seconds"] = alone(compile_seconds, name)
    said = alone(planned, name)
    floor = said["roofline_seconds"]["compute"] * said["cycles"]["hertz"]
    others = {key: said[key] for key in ("cycles", "memory", "sent_bytes", "sent_seconds", "waiting_seconds")}
    return {**row, "mesh": said["sharding"]["mesh"], "floor": floor, **others}


def line(name: str, row: dict[str, Any]) -> str:
    """A row of the table."""
    scheduled, by_xla = sum(row["cycles"]["by_scope"].values()), row["cycles"]["by_xla"]
    mesh = " x ".join(f"{axis} {size}" for axis, size in row["mesh"].items() if size > 1)
    passes = "2" if GUIDANCE[name.split()[0]] is TWO_PASSES else "4"
    peer = f"{by_xla / 1e6 / PEER[name]:.2f}" if name in PEER else ""
    cycles = [f"{number / 1e6:.1f}" for number in (row["floor"], scheduled, by_xla)]
    ratio = f"{scheduled / row['floor']:.2f}"
    sizes = [row["memory"]["peak_bytes"], row["memory"]["temporaries_bytes"], row["sent_bytes"]]
    figures = [*cycles[:2], ratio, cycles[2], peer, *(f"{size / 1e9:.2f}" for size in sizes)]
    figures.append(f"{row['sent_seconds'] * 1e3:.0f}" if "sent_seconds" in row else "")
    figures.append(f"{row['waiting_seconds'] * 1e3:.0f}" if "waiting_seconds" in row else "")
    timed = "compile_seconds" in row
    compiled = [f"{row['compile_seconds']:.0f}", f"{row['load']:.1f}"] if timed else ["", ""]
    return f"| {' | '.join([name, passes, mesh, *figures, *compiled, row['commit']])} |\n"


def network_lines(name: str, row: dict[str, Any]) -> Iterator[str]:
    """The rows of the networks' table."""
    model, size, slice_ = name.split()
    for network in OTHERS[size]:
        said = row["programs"][network]
        cycles, memory = said["cycles"], said["memory"]
        scheduled, hertz = sum(cycles["by_scope"].values()), cycles["hertz"]
        least = row["least_seconds"][network] * hertz
        figures = [f"{least / 1e6:.1f}", f"{scheduled / 1e6:.1f}", f"{scheduled / least:.1f}"]
        figures += [f"{cycles['by_xla'] / 1e6:.1f}", f"{scheduled / hertz * 1e3:.0f}"]
        figures += [f"{memory[key] / 1e9:.2f}" for key in ("peak_bytes", "temporaries_bytes")]
        figures += [f"{said['compile_seconds']:.0f}", f"{row['load']:.1f}", row["commit"]]
        shown = f"{network} by diffusion" if size == TILES else network
        yield f"| {' | '.join([f'{model} {slice_}', shown, *figures])} |\n"


def names() -> Iterator[str]:
    """All rows: model, size and slice, and the type of eight bits of some."""
    rows = product((*SIZES, NETWORKS, TILES), SLICES, GUIDANCE)
    made = (f"{model} {size} {slice_}" for size, slice_, model in rows if size != TILES or model == "ltx2.5")
    return chain(made, EIGHT_BITS)


def read_rows() -> Rows:
    """The rows that were made."""
    return json.loads(ROWS.read_text()) if ROWS.exists() else {}


def write_results(measured: str) -> None:
    """Write the tables behind what was measured."""
    rows = read_rows()
    made = [name for name in names() if name in rows]
    others = [name for name in made if name.split()[1] in OTHERS]
    table = HEADER + "".join(line(name, rows[name]) for name in made if name not in others)
    if networks := "".join(text for name in others for text in network_lines(name, rows[name])):
        table += NETWORKS_HEADER + networks
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
            print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
