"""Clips to ask for in both programs' words, and the checkpoint they are made with."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTX2Pipeline
from safetensors.torch import save_file

from ltx2_cli import load, run
from ltx2_cli.core.components import Components
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import START, run_phases
from ltx2_cli.core.state import OnProgress, RunState, ignore_progress
from ltx2_cli.diffusion.latents import from_tokens
from ltx2_cli.plan.resolve import Plan, resolve
from ltx2_cli.plan.stages import InitialLatents
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.request.spec import Streams
from parity import relative_error
from tiny import draw_noise

PROMPT, NEGATIVE = "A red ball bounces, once.", "blurry"
TEXT_TOKENS = 32


class Size(NamedTuple):
    num_frames: int
    height: int
    width: int
    fps: float


class Case(NamedTuple):
    """How one clip is asked for, in both programs' words."""

    size: Size
    steps: int
    video: tuple[float, float, float, float]  # guidance, stg, modality, rescale
    audio: tuple[float, float, float, float]
    stg_blocks: tuple[int, ...]
    prompt: str = PROMPT


ALL_ON = Case(Size(17, 64, 96, 24.0), 3, (3.0, 1.0, 3.0, 0.7), (7.0, 0.5, 2.0, 0.4), (1,))
CASES = {
    "all guidance": ALL_ON,
    "one latent frame, two blocks": Case(Size(1, 96, 64, 12.5), 2, (2.0, 1.5, 1.5, 1.0), (4.0, 1.0, 3.0, 0.7), (0, 2)),
    "no guidance": Case(Size(9, 64, 64, 30.0), 4, (1.0, 0.0, 1.0, 0.0), (1.0, 0.0, 1.0, 0.0), (1,)),
}

UNUSUAL_CASE = Case(
    Size(17, 64, 96, 23.976), 3, (2.5, 0.5, 2.0, 0.3), (4.0, 1.5, 3.0, 0.8), (1, 3), "Ein Bär 🐻 gähnt, 雨"
)


class Checkpoint(NamedTuple):
    folder: Path
    pipeline: LTX2Pipeline


def reference(
    pipeline: LTX2Pipeline, case: Case, seed: int, output_type: str, **others: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """What diffusers makes of it; "latent" gives denormalised latents."""
    names = ("guidance_scale", "stg_scale", "modality_scale", "guidance_rescale")
    # An audio value of zero means "as the video" there.
    audio = {f"audio_{name}": value or 1e-12 for name, value in zip(names, case.audio, strict=True)}
    output = pipeline(
        prompt=case.prompt,
        negative_prompt=NEGATIVE,
        num_frames=case.size.num_frames,
        height=case.size.height,
        width=case.size.width,
        frame_rate=case.size.fps,
        num_inference_steps=case.steps,
        **dict(zip(names, case.video, strict=True)),
        **audio,
        spatio_temporal_guidance_blocks=list(case.stg_blocks),
        generator=torch.Generator().manual_seed(seed),
        max_sequence_length=TEXT_TOKENS,
        output_type=output_type,
        return_dict=False,
        **others,
    )
    return output


def at_levels(pipeline: LTX2Pipeline, sigmas: Sequence[float], size: Size, **begin: object) -> Streams[torch.Tensor]:
    """What diffusers makes without guidance, at these noise levels themselves; it adds the last, 0."""
    scheduler = pipeline.scheduler
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler.from_config(
        scheduler.config, use_dynamic_shifting=False, shift_terminal=None
    )
    try:
        return pipeline(
            prompt=PROMPT,
            num_frames=size.num_frames,
            height=size.height,
            width=size.width,
            frame_rate=size.fps,
            sigmas=list(sigmas),
            num_inference_steps=len(sigmas),
            **dict.fromkeys(("guidance_scale", "modality_scale", "audio_guidance_scale", "audio_modality_scale"), 1.0),
            **dict.fromkeys(("stg_scale", "guidance_rescale", "audio_stg_scale", "audio_guidance_rescale"), 0.0),
            max_sequence_length=TEXT_TOKENS,
            output_type="latent",
            return_dict=False,
            **begin,
        )
    finally:
        pipeline.scheduler = scheduler


def reference_latents(
    pipeline: LTX2Pipeline, case: Case, seed: int, **others: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """diffusers' latents as its denoiser left them: normalised, in the files' layout."""
    return normalised(pipeline, *reference(pipeline, case, seed, "latent", **others))


def normalised(pipeline: LTX2Pipeline, video: torch.Tensor, audio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents that diffusers returned."""
    mean, std = (stat.view(1, -1, 1, 1, 1) for stat in (pipeline.vae.latents_mean, pipeline.vae.latents_std))
    packed = pipeline._pack_audio_latents(audio)
    packed = pipeline._normalize_audio_latents(packed, pipeline.audio_vae.latents_mean, pipeline.audio_vae.latents_std)
    mels = pipeline.audio_vae.config.mel_bins // 4
    return (video - mean) / std, pipeline._unpack_audio_latents(packed, audio.shape[2], num_mel_bins=mels)


def denormalised(pipeline: LTX2Pipeline, video: torch.Tensor, audio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised latents, as diffusers takes and returns them."""
    mean, std = (stat.view(1, -1, 1, 1, 1) for stat in (pipeline.vae.latents_mean, pipeline.vae.latents_std))
    packed = pipeline._pack_audio_latents(audio)
    packed = pipeline._denormalize_audio_latents(
        packed, pipeline.audio_vae.latents_mean, pipeline.audio_vae.latents_std
    )
    mels = pipeline.audio_vae.config.mel_bins // 4
    return video * std + mean, pipeline._unpack_audio_latents(packed, audio.shape[2], num_mel_bins=mels)


def plan_of(
    checkpoint: Checkpoint,
    case: Case,
    seed: int | None,
    noise: Path | None = None,
    source: InitialLatents | None = None,
    **overrides: object,
) -> Plan:
    if noise is not None:
        save_file(draw_noise(checkpoint.pipeline, seed, *case.size), noise)
    names = ("guidance_scale", "stg_scale", "modality_scale", "guidance_rescale")
    guidance = {
        f"guidance.{stream}.{name}": value
        for stream, values in (("video", case.video), ("audio", case.audio))
        for name, value in zip(names, values, strict=True)
    }
    asked = {
        "prompt": case.prompt,
        "negative_prompt": NEGATIVE,
        "model": str(checkpoint.folder),
        "compat": "diffusers",
        **case.size._asdict(),
        "num_inference_steps": case.steps,
        "stg_blocks": case.stg_blocks,
        "dtype": "float32",
        "text_encoder_dtype": "float32",
        "max_sequence_length": TEXT_TOKENS,
        "initial_noise": None if noise is None else str(noise),
        "seed": seed,
        "sharding": "single",
        **guidance,
        **overrides,
    }
    return resolve(read_spec(asked), source)


def make_latents(
    plan: Plan, components: Components, start: RunState = START, on_progress: OnProgress = ignore_progress
) -> Streams[np.ndarray]:
    """Clean latents of every video, as tokens."""
    *_, state = run_phases(plan, start, components, Report(), on_progress)
    return state.latents


def final_latents(plan: Plan, components: Components | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Normalised latents in the files' layout."""
    tokens = make_latents(plan, components or Components(plan))
    return tuple(from_tokens(Streams(*map(np.asarray, tokens)), plan.latent_shapes))


def check_latents(checkpoint: Checkpoint, case: Case, folder: Path) -> None:
    """Both programs denoise to the same."""
    ours = final_latents(plan_of(checkpoint, case, seed=5, noise=folder / "noise.safetensors"))
    theirs = reference_latents(checkpoint.pipeline, case, 5)
    errors = [relative_error(got, wanted) for got, wanted in zip(ours, theirs, strict=True)]
    assert max(errors) <= 1e-4, errors


def check_media(checkpoint: Checkpoint, case: Case, sample_rate: int, folder: Path) -> None:
    """Both programs show and sound the same."""
    plan = plan_of(checkpoint, case, seed=6, noise=folder / "noise.safetensors")
    (media,) = run(plan, load(plan))
    frames, waveform = reference(checkpoint.pipeline, case, 6, "pt")
    assert media.frames.shape == (case.size.num_frames, case.size.height, case.size.width, 3)
    wanted = (frames[0].movedim(1, -1) * 255).round().numpy()
    assert np.abs(media.frames - wanted).max() <= 1  # a level of 255 may round the other way
    assert relative_error(media.waveform.T, waveform[0]) <= 5e-4  # the latents' rounding, through a logarithm
    assert (media.sample_rate, media.fps) == (sample_rate, case.size.fps)
    latent_frame = 8 / case.size.fps
    assert abs(len(media.waveform) / media.sample_rate - len(media.frames) / media.fps) < latent_frame
