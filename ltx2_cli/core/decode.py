"""Latents to media, by the VAEs and the vocoder."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ltx2_cli.core.advice import check_finite, memory_for
from ltx2_cli.core.components import Components, network_program
from ltx2_cli.core.decode_audio_tiles import decode_audio, join_audio
from ltx2_cli.core.decode_pixel_tiles import REPLICATED, decode_by_tiles, tile_programs
from ltx2_cli.core.decode_video_tiles import decode_tiled
from ltx2_cli.core.programs import Program
from ltx2_cli.core.report import DECODE, Report
from ltx2_cli.diffusion.latents import token_shapes
from ltx2_cli.media.audio import Audio
from ltx2_cli.media.clip import NO_AUDIO, NO_FRAMES, Media
from ltx2_cli.models.audio_vae import AudioVAE
from ltx2_cli.models.video_vae import VideoVAE
from ltx2_cli.models.vocoder import Vocoder, VocoderWithBWE
from ltx2_cli.nn.layers import IMAGE_AXES
from ltx2_cli.parallel.arrays import to_devices, to_first_host, to_host
from ltx2_cli.parallel.jit import jitted
from ltx2_cli.plan.decoding import TILE_AXIS, VIDEO_AXIS, DecodePlan
from ltx2_cli.plan.pixel_tiles import PixelTiles
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.spec import BOTH, Streams
from ltx2_cli.weights.published import DIFFUSION_DECODER

PART_AXES = (*IMAGE_AXES, TILE_AXIS)  # along which devices make parts of the same audio


def decode(
    plan: Plan,
    latents: Streams[np.ndarray],
    seeds: Sequence[int],
    components: Components,
    report: Report,
    wanted: Streams[bool] = BOTH,
) -> Iterator[Media]:
    """Yield the media of each video, from latents as tokens [videos, tokens, channels] and the videos' seeds, which
    draw the noise of the diffusion decoder. Streams that are not wanted are empty, and all streams on hosts but the
    first. Input audio is copied from its file."""
    videos, at_once, decoded = len(latents.video), plan.decoding.videos, _decoded(plan, wanted)
    with memory_for(DECODE, plan), ExitStack() as loaded:
        networks = {
            name: loaded.enter_context(components.use(name, report))
            for name, needed in (
                (plan.video_decoder, decoded.video),
                ("audio_vae", decoded.audio),
                ("vocoder", decoded.audio),
            )
            if needed
        }
        for first in range(0, videos, at_once):
            rows = np.minimum(np.arange(first, first + at_once), videos - 1)  # the last one fills up the devices
            with report.activity(DECODE):
                frames, waveforms = _decode_rows(plan, latents, np.array(seeds, np.uint32), rows, networks)
            for clip, waveform in list(zip(frames, waveforms, strict=True))[: videos - first]:
                media = Media(clip, waveform, plan.stages[-1].geometry.fps, plan.arch.vocoder.output_sampling_rate)
                yield _with_input_audio(media, plan.input_audio) if wanted.audio and plan.input_audio else media


def _decode_rows(
    plan: Plan, latents: Streams[np.ndarray], seeds: np.ndarray, rows: np.ndarray, networks: Mapping[str, Any]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Frames and waveforms of these videos on the first host; empty without a network for them. No other reference to
    arrays on the devices exists."""
    frames, waveforms = [NO_FRAMES] * len(rows), [NO_AUDIO] * len(rows)
    decoded_video = decoded_audio = None
    if plan.video_decoder in networks:
        _, channels, *size = plan.latent_shapes.video
        video = to_devices(latents.video[rows].reshape(len(rows), *size, channels), plan.decoding.latents)
        if plan.networks.diffusion_decoder:
            frames = decode_by_tiles(plan, networks[DIFFUSION_DECODER], video, seeds[rows], frames)
        else:
            decoded_video = _video_program(plan)(networks["vae"], video)
    if decoded_video and not plan.decoding.at_once:  # its memory is free before the audio is decoded
        frames, decoded_video = _clips(decoded_video, plan, frames), None
    if "vocoder" in networks:
        tokens = to_devices(latents.audio[rows], plan.decoding.tokens)
        decoded_audio = _audio_program(plan)(networks["audio_vae"], networks["vocoder"], tokens)
    frames = _clips(decoded_video, plan, frames) if decoded_video else frames
    if decoded_audio and (samples := _on_first_host(decoded_audio, "audio", plan)) is not None:
        waveforms = list(samples)
    return frames, waveforms


def _decoded(plan: Plan, wanted: Streams[bool]) -> Streams[bool]:
    """The wanted streams that a decoder makes."""
    video, audio = plan.running
    return Streams(wanted.video and video, wanted.audio and audio and plan.input_audio is None)


def _with_input_audio(media: Media, audio: Audio) -> Media:
    """Media with the input audio, as long as its frames."""
    waveform = audio.lasting(len(media.frames) / media.fps)
    return replace(media, waveform=waveform, sample_rate=audio.sample_rate)


def media_programs(plan: Plan, wanted: Streams[bool] = BOTH) -> list[Program]:
    """The programs of `decode`."""
    decoded = _decoded(plan, wanted)
    video = tile_programs(plan) if plan.networks.diffusion_decoder else [_video_program(plan)]
    return [*(video if decoded.video else []), *([_audio_program(plan)] if decoded.audio else [])]


def _video_program(plan: Plan) -> Program:
    """Latents [videos, frames, height, width, channels] to frames, and whether each device's are finite."""
    (_, channels, *size), decoding = plan.latent_shapes.video, plan.decoding
    latents = jax.ShapeDtypeStruct((decoding.videos, *size, channels), np.float32, sharding=decoding.latents)
    function = jitted(_frames, None, plan.sharding, convolves=True, sizes=latents.shape, decoding=decoding)
    return network_program(plan, "frames", ["vae"], function, latents)


def _audio_program(plan: Plan) -> Program:
    """Tokens [videos, tokens, channels · mels] to waveforms, and whether each device's are finite."""
    shape, decoding = token_shapes(plan.decoding.videos, plan.latent_shapes).audio, plan.decoding
    tokens = jax.ShapeDtypeStruct(shape, np.float32, sharding=decoding.tokens)
    function = jitted(_waveforms, None, plan.sharding, convolves=True, sizes=shape, decoding=decoding)
    return network_program(plan, "audio", ["audio_vae", "vocoder"], function, tokens)


def _clips(video: tuple[jax.Array, jax.Array], plan: Plan, otherwise: list[np.ndarray]) -> list[np.ndarray]:
    """The frames of each video [frames, height, width, 3] on the first host; `otherwise` on the others."""
    levels = _on_first_host(video, "video", plan)
    return otherwise if levels is None else [clip.reshape(*clip.shape[:2], -1, 3) for clip in levels]


def _on_first_host(output: tuple[jax.Array, jax.Array], what: str, plan: Plan) -> np.ndarray | None:
    decoded, finite = output
    check_finite(to_host(finite), f"the decoded {what} is", plan)
    return to_first_host(decoded)


def _frames(vae: VideoVAE, latents: jax.Array, decoding: DecodePlan) -> tuple[jax.Array, jax.Array]:
    """Latents [videos, frames, height, width, channels] to levels [videos, frames, height, width · 3]."""

    def part(vae: VideoVAE, latents: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert not isinstance(decoding.tiles, PixelTiles)
        levels, finite = decode_tiled(vae, latents, decoding.tiles, decoding.white)
        return levels, finite.reshape(1, 1, 1)

    where, whose = decoding.latents.spec, PartitionSpec(VIDEO_AXIS, *IMAGE_AXES)
    split = jax.shard_map(part, mesh=decoding.mesh, in_specs=(REPLICATED, where), out_specs=(where, whose))
    return split(vae, latents)


def _waveforms(
    audio_vae: AudioVAE, vocoder: Vocoder | VocoderWithBWE, tokens: jax.Array, decoding: DecodePlan
) -> tuple[jax.Array, jax.Array]:
    """Tokens [videos, tokens, channels · mels] to float32 [videos, samples, channels] in [-1, 1]."""

    assert decoding.audio_tiles
    tiles = decoding.audio_tiles
    axes = PART_AXES if tiles.number_of_parts > 1 else ()  # else the devices do the same work

    def part(networks: tuple[AudioVAE, Vocoder | VocoderWithBWE], tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        pieces = decode_audio(*networks, tokens, tiles, jax.lax.axis_index(axes) if axes else 0)
        return jnp.clip(pieces, -1, 1)[:, None], jnp.isfinite(pieces).all().reshape(1, 1)

    outputs = PartitionSpec(None, axes, VIDEO_AXIS), PartitionSpec(axes, VIDEO_AXIS)
    split = jax.shard_map(part, mesh=decoding.mesh, in_specs=(REPLICATED, decoding.tokens.spec), out_specs=outputs)
    pieces, finite = split((audio_vae, vocoder), tokens)
    gathered = jax.lax.with_sharding_constraint(
        pieces, NamedSharding(decoding.mesh, PartitionSpec(None, None, VIDEO_AXIS))
    )
    return join_audio(gathered, tiles), finite
