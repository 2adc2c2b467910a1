"""A step of LTX-2's denoiser on one GPU: random weights in bfloat16, 768x512x121; ours, and diffusers' compiled.

`python -m benchmarks.gpu_step` prints a table. Each side is a process of its own. They take turns where the GPU's
memory holds both, and follow each other where it does not. `--tiny` takes the embedded model and any device instead:
it shows that this works, not how fast.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ltx2_cli.plan.resolve import Plan

PASSES = (2, 1)
REACHED = 790e12  # FLOP/s of a large bfloat16 product on an H200
ROOM_FOR_BOTH = 100e9  # bytes: two times 38 GB of weights, and what is beside them
SIDES = ("ours", "theirs")

RequestLayers = dict[str, Any]
Turn = Callable[[RequestLayers], float]


def repetitions(tiny: bool) -> tuple[int, int]:
    """Rounds, and the steps of each."""
    return (1, 3) if tiny else (3, 10)


def plan_of(tiny: bool, passes: int) -> "Plan":
    """The clip, on one device."""
    import jax

    from ltx2_cli.plan.resolve import plan_offline
    from ltx2_cli.request.profiles import read_spec

    size = {"model": "demo", "height": 64, "width": 64, "num_frames": 9} if tiny else {"model": "ltx2"}
    scales = {"guidance_scale": 1.0 + (passes > 1), "stg_scale": 0.0, "modality_scale": 1.0}
    guidance = {f"guidance.{each}.{name}": scale for each in ("video", "audio") for name, scale in scales.items()}
    _, steps = repetitions(tiny)
    asked = {"prompt": "rain", "seed": 0, "sharding": "single", "num_inference_steps": steps, **size, **guidance}
    return plan_offline(read_spec(asked), jax.devices()[:1])


def ours(tiny: bool) -> Turn:
    """The loop of a run, with attention by the GPU's own kernel."""
    import jax

    from ltx2_cli.core.bench import random_network
    from ltx2_cli.core.components import Components, abstract_network
    from ltx2_cli.core.encode import abstract_contexts
    from ltx2_cli.core.report import Report, Timings
    from ltx2_cli.core.run import run_phases
    from ltx2_cli.core.state import RunState
    from ltx2_cli.plan.inputs import CONNECTORS

    def normal(x: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.random.normal(jax.random.key(0), x.shape, x.dtype)

    plans = {passes: plan_of(tiny, passes) for passes in PASSES}
    components = Components(plans[1])
    components.resident["transformer"] = random_network(abstract_network(plans[1], "transformer"))
    components.keep(components.resident)
    contexts = {passes: jax.tree.map(normal, abstract_contexts(plan)) for passes, plan in plans.items()}

    def turn(asked: RequestLayers) -> float:
        timings, passes = Timings(Report()), asked["passes"]
        list(run_phases(plans[passes], RunState(contexts={CONNECTORS: contexts[passes]}), components, timings))
        return median(timings.denoise_steps[1:])

    return turn


def asked(tiny: bool, passes: int) -> RequestLayers:
    """The same clip in words that need nothing of ours: what JAX brings confuses torch's compiler."""
    from ltx2_cli.core.report import DENOISE
    from ltx2_cli.estimate.flops import phase_flops

    plan = plan_of(tiny, passes)
    arch, (stage,) = plan.arch.transformer, plan.stages
    video, audio = arch.streams
    rows, text, geometry = len(stage.passes), plan.spec.max_sequence_length, stage.geometry
    return {
        "passes": passes,
        "steps": repetitions(tiny)[1],
        "flops": phase_flops(plan, DENOISE),
        "config": asdict(arch) | arch.only,
        "arrays": {
            "hidden_states": (rows, geometry.video_tokens, video.in_channels),
            "audio_hidden_states": (rows, geometry.audio_frames, audio.in_channels),
            "encoder_hidden_states": (rows, text, video.caption_channels or video.text_width),
            "audio_encoder_hidden_states": (rows, text, audio.caption_channels or audio.text_width),
        },
        "sizes": {
            "num_frames": geometry.frames,
            "height": geometry.height,
            "width": geometry.width,
            "audio_num_frames": geometry.audio_frames,
            "fps": geometry.fps,
        },
    }


def theirs(config: RequestLayers) -> Turn:
    """diffusers' transformer, its blocks compiled by torch; guidance is left out of its time."""
    import torch
    from diffusers import LTX2VideoTransformer3DModel

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = LTX2VideoTransformer3DModel.from_config(config).eval()
    torch.set_default_dtype(torch.float32)
    if on_gpu:
        model.compile_repeated_blocks(fullgraph=True, dynamic=False)

    def turn(asked: RequestLayers) -> float:
        arrays = {
            name: torch.randn(shape, dtype=torch.bfloat16, device=device) for name, shape in asked["arrays"].items()
        }
        noise, seconds = torch.full((asked["passes"],), 500.0, device=device), []
        for _ in range(asked["steps"]):
            began = time.perf_counter()
            with torch.no_grad():
                model(**arrays, timestep=noise, sigma=noise, **asked["sizes"])
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return median(seconds[1:])

    return turn


def serve(side: str, tiny: bool) -> None:
    """For each line of JSON on stdin, what is asked, one turn: its seconds a step on stdout."""
    turn: Turn | None = None
    for line in sys.stdin:
        wanted = json.loads(line)
        turn = turn or (ours(tiny) if side == "ours" else theirs(wanted["config"]))
        print(turn(wanted), flush=True)


def started(side: str, tiny: bool) -> subprocess.Popen[str]:
    """A process that serves."""
    command = [sys.executable, "-m", "benchmarks.gpu_step", f"--side={side}", *["--tiny"] * tiny]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # what one side does not need is the other's
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def seconds_of(sides: Sequence[str], clips: Sequence[RequestLayers], tiny: bool) -> dict[tuple[str, int], float]:
    """A step of each clip on these sides, which take turns; the first turn compiles."""
    found, (rounds, _) = defaultdict[tuple[str, int], list[float]](list), repetitions(tiny)
    with ExitStack() as running:
        processes = {side: running.enter_context(started(side, tiny)) for side in sides}
        for clip, turn in product(clips, range(1 + rounds)):
            for side, process in processes.items():
                assert process.stdin
                assert process.stdout
                process.stdin.write(json.dumps(clip) + "\n")
                process.stdin.flush()
                said = float(process.stdout.readline())
                found[side, clip["passes"]] += [said] * (turn > 0)
    return {which: median(seconds) for which, seconds in found.items()}


def lines(tiny: bool, room: float) -> Iterator[str]:
    """The table in Markdown."""
    groups = [SIDES] if room > ROOM_FOR_BOTH else [[side] for side in SIDES]
    clips, seconds = [asked(tiny, passes) for passes in PASSES], dict[tuple[str, int], float]()
    order = "in alternation" if len(groups) == 1 else "one side after the other"
    rounds, steps = repetitions(tiny)
    yield f"{rounds} rounds of {steps} steps, {order}, medians"
    yield from ("", "| passes | ours, s a step | of 790 TFLOP/s | diffusers, s | ours / theirs |", "|---" * 5 + "|")
    for sides in groups:
        seconds |= seconds_of(sides, clips, tiny)
    for clip in clips:
        here, there = (seconds[side, clip["passes"]] for side in SIDES)
        share = clip["flops"] / here / REACHED
        yield f"| {clip['passes']} | {here:.4f} | {share:.2%} | {there:.4f} | {here / there:.2f} |"


def gpu_bytes() -> float:
    """The memory of the first GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    return 2**20 * float(subprocess.run(query, stdout=subprocess.PIPE, check=True, text=True).stdout.split()[0])


def main() -> None:
    """Print the table, or serve one side of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        serve(given.side, given.tiny)
        return
    if not given.tiny and shutil.which("nvidia-smi") is None:
        sys.exit("there is no NVIDIA GPU here; --tiny runs anywhere")
    import jax

    jax.config.update("jax_platforms", "cpu")  # the GPU is for the sides
    for line in lines(given.tiny, math.inf if given.tiny else gpu_bytes()):
        print(line, flush=True)


if __name__ == "__main__":
    main()
