"""How far runs in eight bits are from bfloat16: a table in accuracy.md, which `python -m benchmarks.accuracy` writes.

Forwards of both generations, of two layers in the published widths with random weights; and clips of the embedded
model.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.loading import denoiser
from ltx2_cli import load, read_spec, resolve
from ltx2_cli.artifacts.files import replacing
from ltx2_cli.core.decode import decode
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import run_phases
from ltx2_cli.core.state import RunState, all_latents
from ltx2_cli.diffusion.geometry import VAECompression, clip_geometry
from ltx2_cli.models.arch import TransformerArch
from ltx2_cli.models.networks import MATRIX_TYPES
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.models.transformer_inputs import DenoiserInputs, PassMasks, rope_tables
from ltx2_cli.request.spec import Streams
from ltx2_cli.weights.declare import Scope, Weight, is_weight
from ltx2_cli.weights.quantized_matrix import QuantizedMatrix, quantize
from ltx2_cli.weights.tensors import MatrixType
from tools.train_demo.evaluate import held_out
from tools.weights import random_weights

RESULTS = Path(__file__).with_name("accuracy.md")
CLIPS = 8
LAYERS = 2
WAYS = {
    f"{weights} | {compute}": MATRIX_TYPES[weights]._replace(rounds_input=compute == "full")
    for weights in MATRIX_TYPES
    for compute in ("weights", "full")
}
ARCHS = {"LTX-2": TransformerArch(num_layers=LAYERS), "LTX-2.3": denoiser().arch}
HEADER = f"""# Accuracy of eight and four bits

Differences from the same run with weights and products of bfloat16: the norm of the difference over that of the result,
and the cosine. Forwards: {LAYERS} layers of the published widths, random weights, 112 tokens of video and 51 of audio.
Clips: {CLIPS} of the embedded model, prompts that it was not trained on, 20 steps; PSNR of all pixels, in dB. The first
row is bfloat16 beside float32. Weights of int4 are rotated before they are rounded (ConvRot), others are not.

| weights | compute | forward LTX-2, video, audio | forward LTX-2.3 | latents of clips, video, audio | cosine | PSNR |
|---|---|---|---|---|---|---|
"""


class Clip(NamedTuple):
    """The latents of a clip, and its frames."""

    latents: Streams[np.ndarray]
    frames: np.ndarray


def error(result: np.ndarray, reference: np.ndarray) -> float:
    """The norm of the difference, relative to that of the reference."""
    return float(np.linalg.norm(result - reference) / np.linalg.norm(reference))


def cosine(result: np.ndarray, reference: np.ndarray) -> float:
    """The cosine of the angle between two arrays."""
    return float(np.vdot(result, reference) / np.linalg.norm(result) / np.linalg.norm(reference))


def psnr(frames: np.ndarray, reference: np.ndarray) -> float:
    """The peak signal-to-noise ratio of frames of 8 bits, in dB."""
    return float(-10 * np.log10(np.mean((frames / 255.0 - reference / 255.0) ** 2)))


def forward(arch: TransformerArch, dtype: str, kind: MatrixType | None) -> Streams[np.ndarray]:
    """The velocities of one forward with random weights; the same for each dtype and kind."""
    wide = random_weights(Transformer(Scope(jnp.float32), arch), seed=0, scale=0.02)
    abstract = Transformer(Scope(dtype, matrices=kind), arch)

    def cast(declared: Weight, weight: Weight) -> Weight:
        value, array = declared.get_value(), weight.get_value()
        rounded = quantize(array, value.type) if isinstance(value, QuantizedMatrix) else array.astype(value.dtype)
        return declared.with_value(rounded)

    model = jax.tree.map(cast, abstract, wide, is_leaf=is_weight)
    geometry = clip_geometry(49, 128, 128, 24.0, VAECompression(8, 32, 25.0), arch.scales)
    draw = np.random.default_rng(0).standard_normal
    counts = geometry.video_tokens, geometry.audio_frames
    latents = Streams(*(jnp.asarray(draw((1, count, 128)), dtype) for count in counts))
    widths = [stream.context_width for stream in arch.streams]
    text = Streams(*(jnp.asarray(draw((1, 128, width)), dtype) for width in widths))
    masks = PassMasks(jnp.ones((arch.num_layers, 1), bool), jnp.ones(1, bool))

    @jax.jit
    def velocities(model: Transformer, latents: Streams[jax.Array], text: Streams[jax.Array]) -> Streams[jax.Array]:
        inputs = DenoiserInputs(model.text_context(text), jnp.zeros(1, jnp.int32), rope_tables(geometry, arch), masks)
        return model(latents, jnp.float32(0.7), inputs)

    return Streams(*(np.asarray(stream, np.float32) for stream in velocities(model, latents, text)))


def clips(**keys: object) -> list[Clip]:
    """Clips of the embedded model for held-out prompts."""
    prompts = [caption.text for _, caption in held_out(CLIPS)]
    base = {"model": "demo", "keep_resident": True, "prompt": prompts[0], "seed": 0, **keys}
    first, made = resolve(read_spec(base)), []
    components, report = load(first), Report()
    for seed, prompt in enumerate(prompts):
        spec = replace(first.spec, prompt=prompt, seed=(seed,))
        read = prompt, *first.prompts[1:]
        plan = replace(first, spec=spec, prompts=read, texts=((prompt,),), seeds=(seed,))
        *_, state = run_phases(plan, RunState(), components, report)
        latents = all_latents(state)
        (media,) = decode(plan, latents, plan.seeds, components, report)
        made.append(Clip(Streams(*map(np.asarray, latents)), media.frames))
    return made


Pair = tuple[Streams[np.ndarray], Streams[np.ndarray]]  # a result and its reference


def row(name: str, forwards: Iterable[Pair], clips: Iterable[tuple[Clip, Clip]]) -> str:
    """A row: forwards and clips, each beside its reference."""
    clips = list(clips)
    latents = [(clip.latents, reference.latents) for clip, reference in clips]
    noise = np.mean([psnr(clip.frames, reference.frames) for clip, reference in clips])
    cells = [*(mean(error, [pair], 4) for pair in forwards), mean(error, latents, 3), mean(cosine, latents, 4)]
    return f"| {name} | {' | '.join(cells)} | {noise:.1f} |\n"


def mean(measure: Callable[[np.ndarray, np.ndarray], float], pairs: Sequence[Pair], digits: int) -> str:
    """The mean over pairs, of video and of audio."""
    by_stream = ([measure(result[i], reference[i]) for result, reference in pairs] for i in range(2))
    return ", ".join(f"{np.mean(numbers):.{digits}f}" for numbers in by_stream)


def main() -> None:
    """Measure every way and write the table."""
    half = {"dtype": "bfloat16", "text_encoder_dtype": "bfloat16"}
    exact = [forward(arch, "float32", None) for arch in ARCHS.values()]
    rounded = [forward(arch, "bfloat16", None) for arch in ARCHS.values()]
    reference = clips(**half)
    lines = [row("bfloat16 | weights", zip(rounded, exact, strict=True), zip(reference, clips(), strict=True))]
    print(lines[0], end="", flush=True)
    for name, kind in WAYS.items():
        weights, compute = name.split(" | ")
        forwards = [forward(arch, "bfloat16", kind) for arch in ARCHS.values()]
        made = clips(**half, weights=weights, compute=compute)
        lines.append(row(name, zip(forwards, rounded, strict=True), zip(made, reference, strict=True)))
        print(lines[-1], end="", flush=True)
    with replacing(RESULTS) as temporary:
        temporary.write_text(HEADER + "".join(lines))


if __name__ == "__main__":
    main()
