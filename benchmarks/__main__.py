"""What the project says about speed and memory, measured on this machine in alternation with what it is compared to.

`python -m benchmarks` prints a table and writes it to benchmarks/results.md.
"""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers import AutoencoderKLLTX2Video, LTX2VideoTransformer3DModel
from jax.sharding import Mesh

from benchmarks import pipeline, plans
from benchmarks.loading import denoiser, to_one_device, write_checkpoint
from ltx2_cli.diffusion.geometry import VAECompression, clip_geometry
from ltx2_cli.models.arch import TransformerArch
from ltx2_cli.models.config import read_arch
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.models.transformer_inputs import DenoiserInputs, PassMasks, rope_tables
from ltx2_cli.models.video_vae import VideoVAE, VideoVAEArch
from ltx2_cli.nn.kernels.dispatch import NATIVE
from ltx2_cli.parallel.constrain import activate
from ltx2_cli.parallel.jit import CONVOLUTION_OPTIONS
from ltx2_cli.parallel.mesh import ShardingPlan
from ltx2_cli.request.spec import Streams
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.load import CHUNK_BYTES, load_weights
from tools.weights import random_weights, save

ROUNDS = 5
PIPELINE_ROUNDS = 3  # a quarter of a minute each
# one layer, and one residual block a level, of the published widths
TRANSFORMER = {"num_layers": 1, "rope_type": "split"}
VAE = {
    "decoder_layers_per_block": (1, 1, 1, 1),
    "decoder_causal": False,
    "spatial_compression_ratio": 32,
    "temporal_compression_ratio": 8,
}


@dataclass(frozen=True)
class Row:
    """One comparison: seconds, or what `what` says, of both sides, a pair a round."""

    what: str
    ours: list[float]
    theirs: list[float]

    def __str__(self) -> str:
        ratios = sorted(a / b for a, b in zip(self.ours, self.theirs, strict=True))
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        return f"| {self.what} | {statistics.median(self.ours):.3f} | {statistics.median(self.theirs):.3f} | {spread} |"


def alternate(what: str, ours: Callable[[], object], theirs: Callable[[], object]) -> Row:
    """Both sides once to warm up, then in turn."""
    sides: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS + 1):
        for side, call in zip(sides, (ours, theirs), strict=True):
            began = time.perf_counter()
            result = jax.block_until_ready(call())
            side.append(time.perf_counter() - began)
            del result  # what it takes to give memory back is no part of either side's work
    return Row(what, sides[0][1:], sides[1][1:])


def denoiser_step(folder: Path) -> Row:
    """One forward of one pass over both streams at 1,536 video tokens, float32, the same weights."""
    arch = read_arch(TransformerArch, TRANSFORMER, "config")
    ours = random_weights(Transformer(Scope(jnp.float32), arch), seed=0)
    save(ours, folder / "transformer.safetensors")
    theirs = LTX2VideoTransformer3DModel(**TRANSFORMER).eval()
    theirs.load_state_dict(_torch_state(folder / "transformer.safetensors"))
    geometry = clip_geometry(49, 448, 512, 24.0, VAECompression(8, 32, 25.0), arch.scales)
    random = np.random.default_rng(0)
    draw = partial(random.standard_normal, dtype=np.float32)
    video, audio = draw((1, geometry.video_tokens, 128)), draw((1, geometry.audio_frames, 128))
    text = draw((1, 256, arch.caption_channels))
    one_cpu = ShardingPlan(Mesh(np.asarray(jax.devices()[:1]), ("device",)), (), (), NATIVE["cpu"][0])
    context = jax.jit(lambda model, text: model.text_context(text))(ours, Streams(text, text))
    switches = PassMasks(jnp.ones((arch.num_layers, 1), bool), jnp.ones(1, bool))

    @jax.jit
    def step(*arguments: Any) -> Any:
        with activate(one_cpu):
            return Transformer.__call__(*arguments)

    ropes = jax.device_put(rope_tables(geometry, arch))
    tensors = {
        "hidden_states": torch.tensor(video),
        "audio_hidden_states": torch.tensor(audio),
        "encoder_hidden_states": torch.tensor(text),
        "audio_encoder_hidden_states": torch.tensor(text),
        "timestep": torch.tensor([500.0]),
        "sigma": torch.tensor([500.0]),
    }
    sizes = {
        "num_frames": geometry.frames,
        "height": geometry.height,
        "width": geometry.width,
        "audio_num_frames": geometry.audio_frames,
        "fps": 24.0,
    }

    def reference() -> None:
        with torch.no_grad():
            theirs(**tensors, **sizes)

    inputs = DenoiserInputs(context, jnp.zeros(1, jnp.int32), ropes, switches)
    return alternate(
        f"denoiser forward, {geometry.video_tokens} video tokens, diffusers",
        lambda: step(ours, Streams(video, audio), jnp.float32(0.5), inputs),
        reference,
    )


def video_decode(folder: Path) -> Row:
    """The video decoder over 17 frames of 256 x 256, float32, the same weights."""
    arch = read_arch(VideoVAEArch, {key: list(v) if isinstance(v, tuple) else v for key, v in VAE.items()}, "config")
    ours = random_weights(VideoVAE(Scope(jnp.float32), arch), seed=0)
    save(ours, folder / "vae.safetensors")
    theirs = AutoencoderKLLTX2Video(**VAE).eval()
    theirs.load_state_dict(_torch_state(folder / "vae.safetensors"))
    latents = np.random.default_rng(0).standard_normal((1, 3, 8, 8, 128), np.float32)
    decode = jax.jit(lambda vae, latents: vae.decoder(latents), compiler_options=CONVOLUTION_OPTIONS["cpu"])
    channels_first = torch.tensor(latents).movedim(-1, 1)

    def reference() -> None:
        with torch.no_grad():
            theirs.decode(channels_first)

    return alternate("video decode, 17 frames 256x256, diffusers", lambda: decode(ours, latents), reference)


def loading(folder: Path, way: str, chunk: int | None) -> Row:
    """Weights from a warm file to the device, bfloat16, against `cat` of the same file."""
    module, path = denoiser(), folder / "model.safetensors"
    if not path.exists():
        write_checkpoint(module, path)
    return alternate(
        f"load {path.stat().st_size / 1e9:.2f} GB {way}, `cat`",
        lambda: jax.tree.leaves(load_weights(module, TensorFiles(folder), to_one_device, chunk_bytes=chunk)),
        lambda: subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True),
    )


WAYS: dict[str, int | None] = {"in chunks, as to a TPU or GPU": CHUNK_BYTES, "as on a CPU": None}


def loading_memory(folder: Path) -> str:
    """The memory that loading the same file takes beyond the weights, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.loading", str(folder / "model.safetensors")]
    said = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    beyond = "{chunks:.0f} MB of memory beyond the weights' in chunks, {cpu:.0f} MB as on a CPU".format(
        **{way: size / 1e6 for way, size in said["beyond"].items()}
    )
    return f"Loading {said['weights'] / 1e9:.2f} GB takes {beyond}."


def demo(folder: Path) -> str:
    """A clip of the embedded model, as for `make demo`: where nothing is compiled, and again."""
    command = [sys.executable, "-m", "ltx2_cli", "generate", "--model", "demo", "--prompt", "a red ball", "--force"]
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        cached_there = os.environ | {"XDG_CACHE_HOME": str(folder)}
        subprocess.run([*command, "-o", folder / "demo.mp4"], env=cached_there, capture_output=True, check=True)
        seconds.append(time.perf_counter() - began)
    return "The demo takes {:.0f} s where nothing is compiled, {:.0f} s after that.".format(*seconds)


def whole_pipeline(folder: Path) -> Iterator[Row]:
    """A clip in float32 from the same files, each side in a process of its own, in turn."""
    pipeline.build(folder, pipeline.PARTS).save_pretrained(folder)
    pipeline.measure("ours", folder)  # compiles
    rounds = [[pipeline.measure(side, folder) for side in pipeline.SIDES] for _ in range(PIPELINE_ROUNDS)]
    for which, what in enumerate(("a clip from files to frames, diffusers", "a clip, GB of memory at most, diffusers")):
        ours, theirs = ([figures[which] for figures in side] for side in zip(*rounds, strict=True))
        yield Row(what, ours, theirs)


def help_time() -> Row:
    """`ltx2 --help` against an empty Python."""
    return alternate(
        "`ltx2 --help`, empty Python",
        lambda: subprocess.run([sys.executable, "-m", "ltx2_cli", "--help"], stdout=subprocess.DEVNULL, check=True),
        lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    )


def _torch_state(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def processor() -> str:
    """The name of the CPU: products in float32 are not equally fast in both libraries on all."""
    names = re.findall("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else []
    return f"{platform.machine()}, {names[0]}" if names else platform.machine()


def lines() -> Iterator[str]:
    """Every comparison, then what has nothing to be compared with."""
    yield (
        f"jax {jax.__version__}, torch {torch.__version__}, {os.cpu_count()} cores of {processor()};"
        f" {ROUNDS} rounds in alternation, medians"
    )
    yield from (
        "",
        "| what (seconds, or as it says), compared with | ours | theirs | ours / theirs (range) |",
        "|---|---|---|---|",
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # torch's threads go on spinning after its work: what needs all cores for itself comes first
        yield from (str(loading(folder, way, chunk)) for way, chunk in WAYS.items())
        yield from (str(measure(folder)) for measure in (denoiser_step, video_decode))
        yield str(help_time())
        yield from map(str, whole_pipeline(folder / "pipeline"))
        yield from ("", loading_memory(folder), demo(folder), "")


def main() -> None:
    """Print what is measured and write it."""
    measured = []
    for line in lines():
        measured.append(line)
        print(line, flush=True)
    plans.write_results("\n".join(measured) + "\n")


if __name__ == "__main__":
    main()
