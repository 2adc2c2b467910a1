"""What was made of a clip, joined with what is kept of it; and where it goes on for longer than is made at once, the
further pieces, each from the end of what is there."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ltx2_cli.core.components import Components
from ltx2_cli.core.decode import decode
from ltx2_cli.core.generate import generate
from ltx2_cli.core.report import Report
from ltx2_cli.core.run_state import RunState, all_latents, latents_of
from ltx2_cli.media.clip import Media, Original
from ltx2_cli.media.joining import joined
from ltx2_cli.models.spectrogram import resample_on_host
from ltx2_cli.plan.edit import edit_of, edited, pieces
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.spec import Streams
from ltx2_cli.request.validation import MAX_SEED


def finished_clips(plan: Plan, state: RunState, rows: range, components: Components, report: Report) -> Iterator[Media]:
    """The clips of these videos as they are written, with what is kept of a clip that was edited."""
    if (count := pieces(plan.spec)) == 1:
        yield from _decoded(plan, latents_of(state, rows), components, report)
        return
    for row in rows:  # one by one: nothing of others is in memory while further pieces are made
        (clip,) = _decoded(plan, latents_of(state, range(row, row + 1)), components, report)
        original = clip.original
        for piece in range(1, count):
            following = _following(plan, clip, (plan.seeds[row] + piece) % (MAX_SEED + 1))
            *_, later = generate(following, RunState(contexts=state.contexts), components, report)
            (clip,) = _decoded(following, all_latents(later), components, report)
        yield replace(clip, original=original)


def _decoded(plan: Plan, latents: Streams[np.ndarray], components: Components, report: Report) -> Iterator[Media]:
    return (_with_kept(plan, made) for made in decode(plan, latents, components, report))


def _with_kept(plan: Plan, made: Media) -> Media:
    """What was made, with what is kept of a clip that was edited; nothing but on the first host."""
    if (number := edited(plan.spec)) is None or not len(made.frames):
        return made
    picture = plan.pictures[number]
    edit = edit_of(plan.spec.conditions[number], picture, plan.stages[-1].geometry)
    waveform = made.waveform[:0]
    if picture.audio:
        waveform, rate = picture.audio.waveform, picture.audio.sample_rate
        made = replace(made, waveform=resample_on_host(made.waveform, made.sample_rate, rate), sample_rate=rate)
    begin, end = edit.seconds
    leading = edit.frames.start if edit.frames.stop else len(picture.frames)
    original = Original(picture.path, picture.sha256, leading, picture.audio is not None and begin == end)
    kept = replace(made, frames=picture.frames, waveform=waveform, original=original)
    return joined(kept, made, edit.first, edit.frames, edit.seconds)


def _following(plan: Plan, clip: Media, seed: int) -> Plan:
    """The plan of one further piece, behind what there is of the clip."""
    number = edited(plan.spec)
    assert number is not None
    conditions, pictures = list(plan.spec.conditions), list(plan.pictures)
    conditions[number] = replace(conditions[number], anew=(len(clip.frames), conditions[number].anew[1]))
    if sound := pictures[number].audio:
        sound = replace(sound, waveform=clip.waveform)
    pictures[number] = replace(pictures[number], frames=clip.frames, audio=sound)
    spec = replace(plan.spec, conditions=tuple(conditions), seed=(seed,))
    return replace(plan, spec=spec, pictures=tuple(pictures), seeds=(seed,))
