"""The small world: what is held out, what captions say, and that pictures and sounds are what scenes say."""

from dataclasses import replace

import numpy as np
import pytest

from ltx2_cli.plan.remarks import prompt_warnings, read_trained_on
from ltx2_cli.weights.hub import DEMO_FOLDER
from tools.train_demo.captions import MOTIONS as DOES
from tools.train_demo.captions import PITCHES as SOUNDING
from tools.train_demo.captions import SHAPES as CALLED
from tools.train_demo.captions import SYNONYMS, caption, participle, words_of
from tools.train_demo.measure import TOGETHER
from tools.train_demo.words import TEXT_TOKENS, UNKNOWN, VOCABULARY, tokenizer, tokens
from tools.train_demo.world import (
    COLOURS,
    DURATION,
    MOTIONS,
    NUM_FRAMES,
    SAMPLING_RATE,
    SHAPES,
    SIZES,
    UNSAID,
    Scene,
    contacts,
    draw_frames,
    draw_scene,
    plain,
    record_sound,
)


def scenes(count: int, held_out: bool = False) -> list[Scene]:
    rng = np.random.default_rng(3)
    return [draw_scene(rng, held_out) for _ in range(count)]


def test_a_combination_is_trained_on_or_held_out() -> None:
    trained, kept = (
        {(scene.shape, scene.colour, scene.motion) for scene in scenes(3000, held_out)} for held_out in (False, True)
    )
    assert not trained & kept
    assert len(trained | kept) == len(SHAPES) * len(COLOURS) * len(MOTIONS)
    assert 0.15 < len(kept) / len(trained | kept) < 0.25


@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_held_out_word_is_trained_on(place: int) -> None:
    """Each pair of two attributes but for the third one's value, even."""
    pairs = [
        {tuple(np.delete([scene.shape, scene.colour, scene.motion], place)) for scene in scenes(3000, held_out)}
        for held_out in (False, True)
    ]
    assert pairs[1] <= pairs[0]


def test_captions_describe_a_scene_in_many_ways() -> None:
    rng, said = np.random.default_rng(0), set()
    for scene in scenes(300):
        text, stated = caption(scene, rng, omit=0)
        said.add(text)
        assert stated >= set(vars(scene)) - {"place", "chance"}
        assert any(name in text for name in SYNONYMS.get(scene.colour, (scene.colour,)))
        assert any(name in text for name in SYNONYMS.get(scene.background, (scene.background,)))
        assert any(name in text for name in CALLED[scene.shape])
        assert any(phrase in text or participle(phrase) in text for phrase in DOES[scene.motion])
        assert any(word in text for word in SOUNDING[scene.pitch])
    assert len(said) == 300
    scene = scenes(1)[0]
    assert len({caption(scene, rng, omit=0) for _ in range(50)}) > 40


def test_captions_leave_out_only_optional_facts() -> None:
    rng = np.random.default_rng(0)
    for scene in scenes(100):
        for each in (scene, plain(scene)):
            _, stated = caption(each, rng, omit=1, brief=True)
            assert set(UNSAID) - stated == {name for name, value in UNSAID.items() if vars(each)[name] == value}
    short = [caption(plain(scene), rng, omit=0.9, brief=True).text for scene in scenes(300)]
    assert 3 <= np.median([len(text.split()) for text in short]) <= 6


def test_no_caption_has_an_unknown_word_or_too_many() -> None:
    rng = np.random.default_rng(1)
    said = [text for scene in scenes(500) for text in (caption(scene, rng, omit=0).text, words_of(scene, rng))]
    ids, mask = tokens(said)
    assert VOCABULARY.index(UNKNOWN) not in ids
    assert ids.shape == (1000, TEXT_TOKENS)
    assert mask.sum(axis=1).max() < TEXT_TOKENS  # so nothing was cut
    assert not mask[:, 0].any()
    assert mask[:, -1].all()


def test_case_and_full_stops_are_ignored_and_other_words_unknown() -> None:
    words = tokenizer()
    red = words.encode("a red ball").ids
    assert words.encode("A Red BALL!").ids == red
    assert words.encode("A Red BALL. Waves;").ids == [*red, VOCABULARY.index(UNKNOWN)]


def test_frames_and_sounds_have_the_size_and_range_of_the_clip() -> None:
    for scene in scenes(20):
        frames, sound = draw_frames(scene, 64), record_sound(scene)
        assert frames.shape == (NUM_FRAMES, 64, 64, 3)
        assert np.abs(frames).max() <= 1
        assert sound.shape == (round(DURATION * SAMPLING_RATE), 2)
        assert 0.05 < np.abs(sound).max() < 1


def test_a_larger_picture_shows_the_same() -> None:
    for scene in scenes(10):
        small, large = draw_frames(scene, 64, slice(3)), draw_frames(scene, 128, slice(3))
        halved = large.reshape(3, 64, 2, 64, 2, 3).mean(axis=(2, 4))
        assert np.abs(halved - small).mean() < 0.01


def test_a_click_begins_at_each_contact() -> None:
    bouncing = [scene for scene in scenes(100) if scene.motion == "bounce"]
    assert len(bouncing) > 5
    for scene in bouncing:
        sound = record_sound(scene)
        fast = np.abs(np.diff(sound[:, 0], n=2))  # what the tone, which is low, has none of
        loud = np.flatnonzero(fast > 0.1) / SAMPLING_RATE
        for time in contacts(scene):
            assert np.any(np.abs(loud - time) < 0.015)
        assert all(np.any(np.abs(contacts(scene) - time) < 0.02) for time in loud)


def test_clicks_of_small_and_large_shapes_differ_in_time() -> None:
    scene = next(scene for scene in scenes(100) if scene.motion == "bounce")
    small, large = (contacts(replace(scene, size=size)) for size in SIZES)
    assert abs(small[1] - large[1]) > 2 * TOGETHER


def test_training_captions_cause_no_warnings() -> None:
    trained_on, rng = read_trained_on(DEMO_FOLDER), np.random.default_rng(5)
    assert trained_on is not None
    for scene in scenes(40):
        for text in (caption(scene, rng, omit=0.1).text, caption(plain(scene), rng, omit=0.9, brief=True).text):
            assert list(prompt_warnings(trained_on, DEMO_FOLDER / "tokenizer", text)) == []
