"""What clips show that are given a picture, a part of a clip or a sound of held-out scenes: further variants of
`python -m tools.train_demo.evaluate`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ltx2_cli import load, read_spec, resolve, run
from ltx2_cli.media.clip import Media
from ltx2_cli.media.write import write_mp4
from tools.train_demo.captions import PICTURED, caption
from tools.train_demo.measure import judge, means, measure, read_mp4
from tools.train_demo.sight import look
from tools.train_demo.world import (
    COLOURS,
    FPS,
    NUM_FRAMES,
    SAMPLING_RATE,
    SHAPES,
    Scene,
    draw_frames,
    draw_scene,
    path,
    record_sound,
)

SEED = 202
SECOND = 24  # frames
NEAR = 0.06  # of the frame: what the end of a motion leaves open of its first second is 0.04
FIRST_FILE, LAST_FILE, CLIP_FILE = "first.png", "last.png", "scene.mp4"


class Variant(NamedTuple):
    """What clips are given, and what their prompts hide; the files are those of `write_files`."""

    request: Mapping[str, Any]
    hidden: Sequence[str] = ()
    pixels: int = 128
    restyles: bool = False  # the files show another shape in another colour


FIRST, LAST = {"path": FIRST_FILE}, {"path": LAST_FILE, "frame": -1}
TWO_STAGES = {"recipe": "two_stage"}


def retaken(streams: str, begin: int, end: int) -> Mapping[str, Any]:
    """These frames of the scene's clip are made anew."""
    return {"conditions": [{"path": CLIP_FILE, "kind": "clip", "regenerate": [begin, end], "streams": streams}]}


def restyled(noise_level: float) -> Variant:
    """All of a clip of another shape in another colour is made anew from this noise level."""
    clip = {"path": CLIP_FILE, "kind": "clip", "regenerate": [0, NUM_FRAMES], "noise_level": noise_level}
    return Variant({"conditions": [clip]}, ("place",), restyles=True)


GIVEN = {
    "first picture": Variant({"conditions": [FIRST]}),
    "first and last picture": Variant({"conditions": [FIRST, LAST]}),
    "first picture, unsaid": Variant({"conditions": [FIRST]}, PICTURED),
    "first and last picture, unsaid": Variant({"conditions": [FIRST, LAST]}, PICTURED),
    "first picture in two stages": Variant({"conditions": [FIRST]} | TWO_STAGES, pixels=256),
    "picture retaken": Variant(retaken("video", 16, 33)),
    "sound retaken": Variant(retaken("audio", 0, NUM_FRAMES)),
    **{f"restyled from {level:g}": restyled(level) for level in (1, 0.9, 0.7, 0.5)},
    "sound, place unsaid": Variant({"audio": {"path": CLIP_FILE}}, ("place",)),
}


def asked(count: int, hidden: Sequence[str]) -> Iterator[tuple[Scene, str]]:
    """Scenes that were never trained on, and what says all of each but what is hidden."""
    for number in range(count):
        rng = np.random.default_rng([SEED, number])
        scene = draw_scene(rng, held_out=True)
        yield scene, caption(scene, rng, omit=0, hidden=hidden).text


def write_files(scene: Scene, pixels: int, folder: Path) -> None:
    """A scene's first and last frame, and its clip."""
    frames = np.round((draw_frames(scene, pixels) + 1) * 127.5).astype(np.uint8)
    Image.fromarray(frames[0]).save(folder / FIRST_FILE)
    Image.fromarray(frames[-1]).save(folder / LAST_FILE)
    write_mp4(Media(frames, record_sound(scene), FPS, SAMPLING_RATE), folder / CLIP_FILE)


def other_style(scene: Scene) -> Scene:
    """The scene with another shape in another colour."""
    shapes, colours = [*SHAPES], [*COLOURS]
    shape = shapes[(shapes.index(scene.shape) + 1) % len(shapes)]
    return replace(scene, shape=shape, colour=colours[(colours.index(scene.colour) + 3) % len(colours)])


def filmed(variant: Variant, count: int, request: Mapping[str, Any]) -> Iterator[tuple[Scene, Media]]:
    """Each scene, and the clip that is made of its prompt and of what it is given, read from its mp4."""
    components = None
    with TemporaryDirectory() as name:
        folder = Path(name)
        for seed, (scene, prompt) in enumerate(asked(count, variant.hidden)):
            write_files(other_style(scene) if variant.restyles else scene, variant.pixels, folder)
            wanted = {"model": "demo", "keep_resident": True, "prompt": prompt, "seed": seed, **request}
            plan = resolve(read_spec(wanted | request_of(variant, folder)))
            components = components or load(plan)
            (made,) = run(plan, components)
            write_mp4(made, folder / "made.mp4")
            yield scene, read_mp4(folder / "made.mp4")


def request_of(variant: Variant, folder: Path) -> dict[str, Any]:
    """What gives a clip the files in a folder."""
    request, audio = dict(variant.request), variant.request.get("audio")
    placed = [each | {"path": str(folder / each["path"])} for each in request.get("conditions", [])]
    return request | {"conditions": placed, "audio": audio and {"path": str(folder / audio["path"])}}


def alike(scene: Scene, frames: np.ndarray, first: int) -> dict[str, bool | None]:
    """Whether frames of a clip, from its frame `first` on, show the colour and the shape of a scene, and where that is
    in the scene's frames."""
    sight, wanted = look(frames), path(scene, (first + np.arange(len(frames))) / FPS)
    apart = np.linalg.norm(sight.track.centres - wanted.centres, axis=1)
    return {
        "colour": sight.colour == scene.colour,
        "shape": sight.shape == scene.shape,
        "place": bool(np.quantile(np.nan_to_num(apart, nan=1), 0.9) < NEAR),
    }


def figures(name: str, count: int, request: Mapping[str, Any]) -> dict[str, Any]:
    """Of so many clips the share that shows what the scene does: in all, in the first second, in the last frame."""
    clips, first_second, end = [], [], []
    for scene, clip in filmed(GIVEN[name], count, request):
        frames = np.asarray(clip.frames)
        clips.append(judge(scene, measure(frames, clip.waveform, clip.sample_rate, clip.fps)))
        first_second.append(alike(scene, frames[:SECOND], 0))
        end.append(alike(scene, frames[-1:], NUM_FRAMES - 1))
    return {**means(clips), "first_second": means(first_second), "end": means(end)}
