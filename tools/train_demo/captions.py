"""Captions of scenes: one scene described in many ways, in full or in a few words."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from tools.train_demo.world import BACKGROUNDS, COLOURS, UNSAID, Scene

SHAPES = {"circle": ("circle", "disc", "ball", "sphere", "dot"), "square": ("square", "box", "cube")}
SHAPES |= {"triangle": ("triangle",)}
SIZES = {"small": ("small", "little", "tiny"), "large": ("large", "big", "huge")}
SYNONYMS = {"purple": ("purple", "violet"), "cyan": ("cyan", "turquoise"), "grey": ("grey", "gray")}
GROUNDS = ("on a {} background", "against a {} background", "over a {} backdrop", "in front of a {} wall")
BRIEF_GROUNDS = ("on a {} background", "on {}", ", {} background", "with a {} background")
MOTIONS = {
    "still": ("stays still", "does not move", "rests", "stands still"),
    "right": (
        *("moves from left to right", "moves to the right", "slides from left to right", "travels to the right"),
        *("moves right", "goes right", "slides right", "goes to the right", "rolls to the right", "flies right"),
    ),
    "left": (
        *("moves from right to left", "moves to the left", "slides from right to left", "travels to the left"),
        *("moves left", "goes left", "slides left", "goes to the left", "rolls to the left", "flies left"),
    ),
    "up": ("moves up", "rises", "goes up", "floats upwards", "moves upwards", "floats up", "flies up"),
    "down": ("moves down", "falls", "goes down", "sinks downwards", "falls down", "moves downwards", "drops"),
    "circle": ("moves in a circle", "goes round in a circle", "circles around", "orbits", "circles", "goes in circles"),
    "bounce": ("bounces", "bounces", "bounces up and down", "jumps up and down", "jumps", "hops"),
    "grow": ("grows", "gets bigger", "grows", "becomes larger", "gets larger", "expands"),
}
PARTICIPLES = {
    "stays": "staying",
    "does not move": "not moving",
    "rests": "resting",
    "stands": "standing",
    "moves": "moving",
    "slides": "sliding",
    "travels": "travelling",
    "goes": "going",
    "rolls": "rolling",
    "flies": "flying",
    "rises": "rising",
    "floats": "floating",
    "falls": "falling",
    "sinks": "sinking",
    "drops": "dropping",
    "circles": "circling",
    "orbits": "orbiting",
    "bounces": "bouncing",
    "jumps": "jumping",
    "hops": "hopping",
    "grows": "growing",
    "gets": "getting",
    "becomes": "becoming",
    "expands": "expanding",
}
PLACES = {
    "top": ("at the top", "near the top"),
    "bottom": ("at the bottom", "near the bottom"),
    "left": ("on the left", "at the left side"),
    "right": ("on the right", "at the right side"),
    "middle": ("in the middle", "in the centre", "in the center"),
}
SOUNDS = ("tone", "note", "sound", "hum")
BEFORE = ("with a {}", "to a {}", "while a {} plays", "and makes a {}")
FIRST = ("a {} plays while", "to the sound of a {} ,", "with a {} ,")
PITCHES = {"low": ("low", "deep"), "medium": ("medium", "middling"), "high": ("high",)}
PICTURED = ("colour", "shape", "place", "background", "size")  # what a picture of a scene shows of it
LOUDNESS = {"quiet": ("quiet", "soft"), "loud": ("loud",)}


class Caption(NamedTuple):
    """A text about a scene, and the attributes that it states."""

    text: str
    stated: frozenset[str]


def caption(
    scene: Scene,
    rng: np.random.Generator,
    omit: float = 0.15,
    brief: bool = False,
    hidden: Collection[str] = (),
) -> Caption:
    """What a person might type for a scene; `brief` in fewer words, as of a list or a headline.

    An attribute of `UNSAID` is left out with probability `omit`, and only where the scene has its value; place likewise
    at any value, colour and shape at any value and more rarely. What is `hidden` is left out always.
    """
    stated = {name for name in vars(scene) if name != "chance" and not _left_out(scene, name, omit, rng)}
    stated -= {*hidden}
    if scene.motion in ("circle", "grow"):
        stated -= {"place"}

    def say(name: str, words: Sequence[str]) -> list[str]:
        return [_one_of(words, rng)] if name in stated else []

    verb = _one_of(MOTIONS[scene.motion], rng)
    doing, early = participle(verb), []
    if brief and "motion" in stated and " " not in doing and rng.random() < 0.3:
        early, does = [doing], []
    else:
        does = say("motion", (doing, doing, f"is {doing}", verb, verb) if brief else (verb, verb, verb, f"is {doing}"))
    adjectives = [*say("size", SIZES[scene.size]), *say("colour", _named(scene.colour))]
    adjectives.insert(rng.integers(len(adjectives) + 1), *early) if early else None
    thing = [*adjectives, *(say("shape", SHAPES[scene.shape]) or ["shape"])]
    subject = [*_article(thing[0], brief, rng), *thing]
    where = say("place", PLACES[scene.place])
    grounds = BRIEF_GROUNDS if brief else GROUNDS
    ground = say("background", [each.format(_one_of(_named(scene.background), rng)) for each in grounds])
    sounds = [*say("loudness", LOUDNESS[scene.loudness]), *say("pitch", PITCHES[scene.pitch])]
    heard = " ".join([*sounds, _one_of(SOUNDS, rng)]) if sounds else ""
    return Caption(_ordered(" ".join(subject), does, where, ground, heard, brief, rng), frozenset(stated))


def _left_out(scene: Scene, name: str, omit: float, rng: np.random.Generator) -> bool:
    if name in UNSAID:
        return rng.random() < omit and vars(scene)[name] == UNSAID[name]
    return rng.random() < (omit if name == "place" else omit / 6)


def _ordered(
    subject: str,
    does: list[str],
    where: list[str],
    ground: list[str],
    heard: str,
    brief: bool,
    rng: np.random.Generator,
) -> str:
    """The parts of a caption in one of the usual orders."""
    order = rng.integers(4)
    if brief and does and rng.random() < 0.15:
        does = [", " + does[0].removeprefix("is ")]
    parts = [subject, *does, *where]
    if order == 0 and ground and not brief:
        parts = [ground.pop() + " ,", *parts]
    if heard and order == 1:
        parts = [_one_of(FIRST, rng).format(heard), *parts, *ground]
    else:
        parts = [*parts, *ground, *([_one_of(BEFORE, rng).format(heard)] if heard else [])]
    return " ".join(parts).replace(" ,", ",")


def _article(word: str, brief: bool, rng: np.random.Generator) -> list[str]:
    if brief and rng.random() < 0.4:
        return []
    return [_one_of(("an" if word[0] in "aeo" else "a", "the") if rng.random() < 0.5 else ("a", "the"), rng)]


def participle(phrase: str) -> str:
    """`moving right` of `moves right`."""
    finite = next(finite for finite in PARTICIPLES if phrase.startswith(finite))
    return PARTICIPLES[finite] + phrase.removeprefix(finite)


def _named(colour: str) -> tuple[str, ...]:
    return SYNONYMS.get(colour, (colour,))


def _one_of(words: Sequence[str], rng: np.random.Generator) -> str:
    return words[int(rng.integers(len(words)))]


def words_of(scene: Scene, rng: np.random.Generator) -> str:
    """One to three of a scene's words, as negative prompts have them."""
    tables = [SIZES[scene.size], _named(scene.colour), SHAPES[scene.shape], MOTIONS[scene.motion]]
    tables.append(_named(scene.background))
    chosen = rng.permutation(len(tables))[: rng.integers(1, 4)]
    return ", ".join(_one_of(tables[number], rng) for number in chosen)


def vocabulary() -> list[str]:
    """Every word of any caption, sorted."""
    tables = (SHAPES, SIZES, SYNONYMS, MOTIONS, PLACES, PITCHES, LOUDNESS)
    phrases = [phrase for table in tables for listed in table.values() for phrase in listed]
    phrases += [*GROUNDS, *BRIEF_GROUNDS, *SOUNDS, *BEFORE, *FIRST, *PARTICIPLES.values(), "a an the shape is"]
    words = {word for phrase in [*phrases, *COLOURS, *BACKGROUNDS] for word in phrase.split()}
    return sorted(words - {"{}"})
