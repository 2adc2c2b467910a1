"""Encode the input videos and audio of each stage to latents of its size."""

from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ltx2_cli.core.advice import CONDITION, CONDITION_AUDIO, check_finite, memory_for
from ltx2_cli.core.components import Components, network_program
from ltx2_cli.core.programs import Program
from ltx2_cli.core.report import Report
from ltx2_cli.media.audio import CHANNELS, fitted
from ltx2_cli.media.images import compressed, covering, reduced
from ltx2_cli.media.videos import Video
from ltx2_cli.models.audio_vae import AudioVAE, AudioVAEArch
from ltx2_cli.models.spectrogram import crop_or_pad, log_mel, resample_on_host, samples_for
from ltx2_cli.models.video_vae import VideoVAE
from ltx2_cli.nn.layers import IMAGE_AXES
from ltx2_cli.parallel.arrays import to_devices, to_host
from ltx2_cli.parallel.jit import jitted
from ltx2_cli.plan.decoding import image_mesh
from ltx2_cli.plan.inputs import AUDIO_ENCODER, VIDEO_ENCODER
from ltx2_cli.plan.phases import Denoise, Phase
from ltx2_cli.plan.positions import PlacedVideo
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import Stage
from ltx2_cli.request.spec import Streams

ConditionLatents = list[np.ndarray]  # of each input of a stage, normalised float32 [tokens, channels]


def encode_conditions(
    plan: Plan, phases: Sequence[Phase], components: Components, report: Report
) -> dict[int, Streams[ConditionLatents]]:
    """The condition latents of the stages of these phases, by the number of the stage."""
    stages = _denoised(phases)
    videos = _encode_videos(plan, stages, components, report)
    audio = _encode_audio(plan, stages, components, report)
    return {number: Streams(videos.get(number, []), audio.get(number, [])) for number in {*videos, *audio}}


def condition_programs(plan: Plan, phases: Sequence[Phase]) -> list[Program]:
    """The programs of `encode_conditions`."""
    stages = _denoised(phases).values()
    return [*_video_programs(plan, stages), *_audio_programs(plan, stages)]


def _denoised(phases: Sequence[Phase]) -> dict[int, Stage]:
    """The stages that these phases denoise, by their numbers."""
    return {phase.number: phase.clip for phase in phases if isinstance(phase, Denoise)}


def _encode_videos(
    plan: Plan, stages: Mapping[int, Stage], components: Components, report: Report
) -> dict[int, ConditionLatents]:
    if not any(stage.placed_videos for stage in stages.values()):
        return {}
    latents = dict[int, ConditionLatents]()
    placed = {video.number: video for stage in stages.values() for video in stage.placed_videos}
    clips = {number: _frames(plan.input_videos[number], video) for number, video in placed.items()}
    with memory_for(CONDITION, plan), components.use(VIDEO_ENCODER, report) as vae, report.activity(CONDITION):
        for number, stage in stages.items():
            encoded = list[np.ndarray]()
            for shown in stage.placed_videos:
                size, fitted = shown.latent_size(stage.geometry), reduced if shown.reference else covering
                height, width = _pixels(plan, size)
                clip = np.stack([fitted(frame, height, width).reshape(height, -1) for frame in clips[shown.number]])
                run = video_program(plan, size, len(clip))
                encoded.append(to_host(run(vae, to_devices(clip[None], image_sharding(plan, size)))))
            check_finite([np.isfinite(array).all() for array in encoded], "the latents of the input video are", plan)
            latents[number] = [array.reshape(-1, array.shape[-1]) for array in encoded]
    return latents


def _video_programs(plan: Plan, stages: Iterable[Stage]) -> list[Program]:
    sizes = [(shown.latent_size(stage.geometry), shown.num_frames) for stage in stages for shown in stage.placed_videos]
    return [video_program(plan, *size) for size in dict.fromkeys(sorted(sizes))]


def video_program(plan: Plan, size: tuple[int, int], num_frames: int) -> Program:
    """The program from pixels in [-1, 1] [videos, frames, height, width · 3] to normalised latents [videos, frames,
    height, width, channels] of this height and width; both are split over the devices."""
    where, (height, width) = image_sharding(plan, size), _pixels(plan, size)
    pixels = jax.ShapeDtypeStruct((1, num_frames, height, 3 * width), np.float32, sharding=where)
    function = jitted(_latents, where, plan.sharding, convolves=True, sizes=pixels.shape, where=where)
    name = f"image {width}x{height}" if num_frames == 1 else f"video {width}x{height}x{num_frames}"
    return network_program(plan, name, [VIDEO_ENCODER], function, pixels)


def _frames(video: Video, placed: PlacedVideo) -> np.ndarray:
    """The frames of an input video that are encoded."""
    if placed.crf:
        return np.stack([compressed(frame, placed.crf) for frame in video.frames])
    return video.frames[placed.skipped : placed.skipped + placed.num_frames]


def image_sharding(plan: Plan, size: tuple[int, int]) -> NamedSharding:
    """Sharding of images whose latents have this height and width."""
    mesh = image_mesh(plan.sharding.mesh.devices.ravel(), (1, *size))
    return NamedSharding(mesh, PartitionSpec(None, None, *IMAGE_AXES))


def _pixels(plan: Plan, size: tuple[int, int]) -> tuple[int, int]:
    """Height and width in pixels of latents of this size."""
    height, width = size
    return height * plan.arch.compression.pixels, width * plan.arch.compression.pixels


def _latents(vae: VideoVAE, pixels: jax.Array, where: NamedSharding) -> jax.Array:
    """Colours lie along the width: an array whose last axis is 3 takes an accelerator forty times its size."""

    def part(vae: VideoVAE, pixels: jax.Array) -> jax.Array:
        return vae.encode(pixels.reshape(*pixels.shape[:3], -1, 3))

    specs = (PartitionSpec(), where.spec)
    return jax.shard_map(part, mesh=where.mesh, in_specs=specs, out_specs=where.spec)(vae, pixels)


def _encode_audio(
    plan: Plan, stages: Mapping[int, Stage], components: Components, report: Report
) -> dict[int, ConditionLatents]:
    """The latents of the condition audio, for each stage that has it."""
    stages = {number: stage for number, stage in stages.items() if stage.audio_conditions}
    audio = plan.condition_audio
    if not stages or audio is None:
        return {}
    arch, latents = plan.arch.audio_vae, dict[int, ConditionLatents]()
    waveform = resample_on_host(audio.waveform, audio.sample_rate, arch.sample_rate)
    with (
        memory_for(CONDITION_AUDIO, plan),
        components.use(AUDIO_ENCODER, report) as vae,
        report.activity(CONDITION_AUDIO),
    ):
        for number, stage in stages.items():
            run, count = audio_program(plan, stage), stage.geometry.audio_frames
            samples = to_devices(fitted(waveform, samples_for(count, arch))[None], plan.decoding.whole)
            encoded = to_host(run(vae, samples))[0]
            check_finite(np.isfinite(encoded), "the latents of the input audio are", plan)
            latents[number] = [encoded] * stage.audio_conditions
    return latents


def _audio_programs(plan: Plan, stages: Iterable[Stage]) -> list[Program]:
    return [audio_program(plan, stage) for stage in stages if stage.audio_conditions]


def audio_program(plan: Plan, stage: Stage) -> Program:
    """The program from samples at the autoencoder's rate [1, samples, channels] to the normalised tokens of a stage's
    whole audio [1, tokens, features]."""
    arch, tokens, where = plan.arch.audio_vae, stage.geometry.audio_frames, plan.decoding.whole
    wave = jax.ShapeDtypeStruct((1, samples_for(tokens, arch), CHANNELS), np.float32, sharding=where)
    function = jitted(_audio_latents, where, plan.sharding, convolves=True, tokens=tokens, arch=arch)
    return network_program(plan, f"audio of {tokens} tokens", [AUDIO_ENCODER], function, wave)


def _audio_latents(vae: AudioVAE, wave: jax.Array, tokens: int, arch: AudioVAEArch) -> jax.Array:
    return vae.encode(crop_or_pad(log_mel(wave, arch.sample_rate, arch), tokens, arch))
