"""Captions of scenes: the same said in many ways, more or less of it."""

import numpy as np

from tools.train_demo.world import BACKGROUNDS, COLOURS, Scene

SHAPES = {"circle": ("circle", "disc", "ball"), "square": ("square", "box"), "triangle": ("triangle",)}
SIZES = {"small": ("small", "little"), "large": ("large", "big")}
GROUNDS = ("on a {} background", "against a {} background", "over a {} backdrop", "in front of a {} wall")
MOTIONS = {
    "still": ("stays still", "does not move", "rests", "stands still"),
    "right": ("moves from left to right", "moves to the right", "slides from left to right", "travels to the right"),
    "left": ("moves from right to left", "moves to the left", "slides from right to left", "travels to the left"),
    "up": ("moves up", "rises", "goes up", "floats upwards"),
    "down": ("moves down", "falls", "goes down", "sinks downwards"),
    "circle": ("moves in a circle", "goes round in a circle", "circles around", "orbits"),
    "bounce": ("bounces", "is bouncing", "bounces up and down", "jumps up and down"),
    "grow": ("grows", "gets bigger", "is growing", "becomes larger"),
}
PLACES = {
    "top": ("at the top", "near the top"),
    "bottom": ("at the bottom", "near the bottom"),
    "left": ("on the left", "at the left side"),
    "right": ("on the right", "at the right side"),
    "middle": ("in the middle", "in the centre"),
}
SOUNDS = ("tone", "note", "sound", "hum")
BEFORE = ("with a {}", "to a {}", "while a {} plays", "and makes a {}")
FIRST = ("a {} plays while", "to the sound of a {} ,", "with a {} ,")
PITCHES = {"low": ("low", "deep"), "medium": ("medium", "middling"), "high": ("high",)}
LOUDNESS = {"quiet": ("quiet", "soft"), "loud": ("loud",)}


def caption(scene: Scene, rng: np.random.Generator, omit: float = 0.15) -> str:
    """What a person might say of a scene; each attribute is left out with probability `omit`, colour and motion half as
    often."""

    def said(words: tuple[str, ...], rarely: bool = False) -> list[str]:
        left_out = rng.random() < (omit / 2 if rarely else omit)
        return [] if left_out else [words[rng.integers(len(words))]]

    adjectives = [*said(SIZES[scene.size]), *said((scene.colour,), rarely=True)]
    thing = said(SHAPES[scene.shape], rarely=True) or ["shape"]
    subject = " ".join([("a", "the")[rng.integers(2)], *adjectives, *thing])
    does = said(MOTIONS[scene.motion], rarely=True)
    where = said(PLACES[scene.place]) if scene.motion not in ("circle", "grow") else []
    ground = [each.format(scene.background) for each in said(GROUNDS)]
    sounds = [*said(LOUDNESS[scene.loudness]), *said(PITCHES[scene.pitch])]
    heard = " ".join([*sounds, SOUNDS[rng.integers(len(SOUNDS))]]) if sounds else ""
    order = rng.integers(4)
    middle = [subject, *does, *where]
    parts = [ground.pop() + " ,", *middle] if order == 0 and ground else middle
    if heard and order == 1:
        parts = [FIRST[rng.integers(len(FIRST))].format(heard), *parts, *ground]
    else:
        parts = [*parts, *ground, *([BEFORE[rng.integers(len(BEFORE))].format(heard)] if heard else [])]
    return " ".join(parts).replace(" ,", ",")


def words_of(scene: Scene, rng: np.random.Generator) -> str:
    """One to three of a scene's words, as negative prompts have them."""
    tables = (SIZES[scene.size], (scene.colour,), SHAPES[scene.shape], MOTIONS[scene.motion], (scene.background,))
    chosen = rng.permutation(len(tables))[: rng.integers(1, 4)]
    return ", ".join(tables[number][rng.integers(len(tables[number]))] for number in chosen)


def vocabulary() -> list[str]:
    """Every word of any caption, sorted."""
    tables = (SHAPES, SIZES, MOTIONS, PLACES, PITCHES, LOUDNESS)
    phrases = [phrase for table in tables for listed in table.values() for phrase in listed]
    phrases += [*GROUNDS, *SOUNDS, *BEFORE, *FIRST, "a the shape"]
    words = {word for phrase in [*phrases, *COLOURS, *BACKGROUNDS] for word in phrase.split()}
    return sorted(words - {"{}"})
