"""Sizes as people say them, of every model in every recipe."""

from itertools import product

import pytest

from ltx2_cli.diffusion.geometry import UpsampleFactors, VAECompression, stage1_size
from ltx2_cli.plan.sizes import legal_lengths
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.request.size import frames_of, size_of

RESOLUTIONS = ("240p", "360p", "480p", "540p", "720p", "1080p")
ASPECTS = (None, "1:1", "4:3", "3:2", "16:9", "21:9", "2.39:1", "9:16", "2:3")
DISTILLED = "rootonchair/LTX-2-19b-distilled"
COMPRESSION, TWICE = VAECompression(frames=8, pixels=32, audio_rate=25), UpsampleFactors(1, 2, 1)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))


@pytest.mark.parametrize("recipe", ["auto", "one_stage", "two_stage", "distilled"])
@pytest.mark.parametrize("model", ["demo", "ltx2", "ltx2.3", DISTILLED, "someone/unknown"])
def test_every_size_that_is_asked_for_becomes_a_legal_one(model: str, recipe: str) -> None:
    spec = read_spec(prompt="a", model=model, recipe=recipe)
    legal = legal_lengths(spec)
    one_stage = recipe == "one_stage" or (recipe == "auto" and model not in (DISTILLED, "someone/unknown"))
    for resolution, aspect in product((None, *RESOLUTIONS), ASPECTS):
        size = size_of(spec.width, spec.height, aspect, resolution, legal)
        assert not any(side % (32 if one_stage else 64) for side in size.values())
        if not one_stage:
            assert stage1_size(121, size["height"], size["width"], TWICE, COMPRESSION)
        if resolution:
            assert abs(min(size.values()) - int(resolution[:-1])) <= (16 if one_stage else 32)
    assert {frames_of(f"{seconds}s", 24, legal) for seconds in (1, 2, 5)} == {25, 49, 121}


def test_the_upsampler_and_the_streams_say_what_two_stages_make() -> None:
    upsampler = "Lightricks/LTX-2/ltx-2-temporal-upscaler-x2-1.0.safetensors"
    keys = {"prompt": "a", "model": "ltx2", "recipe": "two_stage", "second_stage.upsampler": upsampler}
    assert legal_lengths(read_spec(keys))["num_frames"][:3] == [1, 17, 33]
    assert legal_lengths(read_spec(keys))["width"][:2] == [64, 96]
    assert legal_lengths(read_spec({**keys, "streams": "audio"}))["num_frames"][:3] == [1, 9, 17]
