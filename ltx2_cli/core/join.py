"""Join the regenerated part of an edited clip with the kept part."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ltx2_cli.core.components import Components
from ltx2_cli.core.decode import decode
from ltx2_cli.core.report import Report
from ltx2_cli.media.clip import Media, Original
from ltx2_cli.media.loudness import normalise_loudness
from ltx2_cli.media.splice import joined
from ltx2_cli.models.spectrogram import resample_on_host
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.spec import Streams


def finished_clips(
    plan: Plan, latents: Streams[np.ndarray], seeds: Sequence[int], components: Components, report: Report
) -> Iterator[Media]:
    """The clips of latents [videos, tokens, channels] of these seeds as they are written: an edited one with its kept
    frames and audio, another at the loudness that is asked for."""
    decoded = decode(plan, latents, seeds, components, report)
    return (with_loudness(plan, _with_kept(plan, made), report) for made in decoded)


def with_loudness(plan: Plan, made: Media, report: Report) -> Media:
    """A clip at the loudness of the request; an edited one, and one without audio, as it is."""
    target = plan.spec.loudness
    if target is None or plan.edit or not len(made.waveform):
        return made
    waveform, sentence = normalise_loudness(made.waveform, made.sample_rate, target)
    if sentence:
        report.note(sentence)
    return replace(made, waveform=waveform)


def _with_kept(plan: Plan, made: Media) -> Media:
    """The edited clip, on the first host; elsewhere, and without an edit, `made`."""
    edit = plan.edit
    if edit is None or not len(made.frames):
        return made
    video = plan.input_videos[edit.number]
    waveform = made.waveform[:0]
    if video.audio:
        waveform, rate = video.audio.waveform, video.audio.sample_rate
        made = replace(made, waveform=resample_on_host(made.waveform, made.sample_rate, rate), sample_rate=rate)
    begin, end = edit.seconds
    leading = edit.frames.start if edit.frames.stop else len(video.frames)
    original = Original(video.path, video.sha256, leading, video.audio is not None and begin == end)
    kept = replace(made, frames=video.frames, waveform=waveform, original=original)
    return joined(kept, made, edit.first, edit.frames, edit.seconds)
