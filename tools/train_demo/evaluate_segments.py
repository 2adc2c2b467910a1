"""What clips show whose second half has a prompt of its own: further variants of `python -m
tools.train_demo.evaluate`."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ltx2_cli import load, read_spec, resolve, run
from ltx2_cli.media.clip import Media
from ltx2_cli.media.write import write_mp4
from tools.train_demo import hearing
from tools.train_demo.captions import caption
from tools.train_demo.hearing import SEMITONE
from tools.train_demo.measure import means, measure, read_mp4
from tools.train_demo.sight import look
from tools.train_demo.track import motion_of
from tools.train_demo.world import COLOURS, PITCHES, RUNG, Scene, draw_scene, frequencies

SEED = 203
CHANGE = 1.0  # seconds
OUTSIDE = 16  # frames at either end, outside the fade around the change
SEGMENTS = {"segments": True, "both in one prompt": False}  # whether each half has its own prompt


def changes(count: int) -> Iterator[tuple[Scene, Scene, str, str]]:
    """Scenes that were never trained on, before and after colour and pitch change, and a caption of each."""
    for number in range(count):
        rng = np.random.default_rng([SEED, number])
        before = draw_scene(rng, held_out=True)
        colour, pitch = (
            rng.choice([name for name in names if name != own])
            for names, own in ((COLOURS, before.colour), (PITCHES, before.pitch))
        )
        after = replace(before, colour=str(colour), pitch=str(pitch))
        first, second = (caption(scene, rng, omit=0).text for scene in (before, after))
        yield before, after, first, second


def judged(before: Scene, after: Scene, clip: Media) -> dict[str, bool | None]:
    """Whether the colour and the pitch change as they are said to, and whether shape and motion stay."""
    frames, rate = np.asarray(clip.frames), clip.sample_rate
    first, last = look(frames[:OUTSIDE]), look(frames[-OUTSIDE:])
    heard = hearing.pitches(hearing.stereo(clip.waveform), rate)
    expected = (frequencies(scene, RUNG * (np.arange(3) + 0.5))[third] for scene, third in ((before, 0), (after, 2)))
    in_tune = [
        pitch is not None and 1 / SEMITONE < pitch / wanted < SEMITONE
        for pitch, wanted in zip((heard[0], heard[2]), expected, strict=True)
    ]
    return {
        "colour before": first.colour == before.colour,
        "colour after": last.colour == after.colour,
        "pitch before": in_tune[0],
        "pitch after": in_tune[1],
        "shape": first.shape == last.shape == before.shape,
        "motion": motion_of(measure(frames, clip.waveform, rate, clip.fps).track) == before.motion,
    }


def segment_figures(name: str, count: int, request: Mapping[str, Any]) -> dict[str, float]:
    """Of so many clips, the share that shows each scene in its own half."""
    components, answers = None, []
    with TemporaryDirectory() as folder:
        for seed, (before, after, first, second) in enumerate(changes(count)):
            apart = {"prompt": first, "segments": [{"start": CHANGE, "prompt": second}]}
            texts = apart if SEGMENTS[name] else {"prompt": f"{first}, then {second}"}
            plan = resolve(read_spec({"model": "demo", "keep_resident": True, "seed": seed, **texts, **request}))
            components = components or load(plan)
            components.adopt(plan)
            (made,) = run(plan, components)
            write_mp4(made, clip := Path(folder) / "clip.mp4")
            answers.append(judged(before, after, read_mp4(clip)))
    return means(answers)
