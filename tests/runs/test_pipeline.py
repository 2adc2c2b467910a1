"""The library by diffusers' names."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ltx2_cli import LTX2, load, read_spec, resolve, run
from ltx2_cli.errors import UsageError

SMALL = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 2}


@pytest.mark.slow
def test_a_call_makes_the_clips_of_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under both names of each argument; the second call loads no network again."""
    image = Image.new("CMYK", (80, 64), (0, 255, 255, 0))  # red, which PNG has no such mode for
    image.convert("RGB").save(tmp_path / "red.png")
    model = LTX2.from_pretrained("demo", keep_resident=True)
    scales = {"guidance_scale": 2.0, "audio_guidance_scale": 4.0}
    seven = torch.Generator().manual_seed(7)
    made = model("a red ball", image=image, frame_rate=12, generator=seven, **SMALL, **scales)
    assert (made.fps, made.seed) == (12, 7)

    keys = {f"guidance.{stream}.guidance_scale": scale for stream, scale in (("video", 2.0), ("audio", 4.0))}
    shown = {"conditions": [{"path": str(tmp_path / "red.png")}], "fps": 12, "seed": 7}
    plan = resolve(read_spec({**SMALL, **keys, **shown}, model="demo", prompt="a red ball"))
    (media,) = run(plan, load(plan))
    np.testing.assert_array_equal(made.frames, media.frames[None])
    np.testing.assert_array_equal(made.audio, media.waveform.T[None])

    loaded = list[str]()
    model.components.after_load = loaded.append
    path = tmp_path / "red.png"
    two = model(
        "a red ball", image=path, frame_rate=12, generator=np.int64(6), num_videos_per_prompt=2, **SMALL, **scales
    )
    assert not loaded
    assert two.frames.shape == (2, 9, 64, 64, 3)
    assert np.abs(two.frames[1].astype(int) - made.frames[0]).max() <= 2  # seed 7, with another in one batch


def test_the_examples_of_the_documentation_make_clips(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/library.md").read_text(encoding="utf-8")
    codes = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "from_pretrained" in code]
    small = "num_frames=9, height=64, width=64, num_inference_steps=2"
    for code in codes:
        exec(compile(code.replace("num_frames=49", small), "library.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == [
        "(1, 9, 64, 64, 3) (1, 2, 15840) 48000 7",
        "(2, 32, 128) (1, 32, 2, 2, 2) (1, 2, 9, 16) (1, 9, 64, 64, 3)",
    ]


def test_wrong_words_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown key"):
        LTX2.from_pretrained("demo", sharing="single")
    with pytest.raises(UsageError, match="`num_inference_step` is no argument of a call") as refused:
        LTX2.from_pretrained("demo")("a red ball", num_inference_step=3)
    assert refused.value.hint == "nearest: num_inference_steps"
    for wrong in ({"generator": "7"}, {"image": np.zeros((4, 4, 3))}):
        with pytest.raises(UsageError, match="is neither a"):
            LTX2.from_pretrained("demo")("a red ball", **wrong)
    with pytest.raises(UsageError, match="height 100 is not a multiple of 32"):
        LTX2.from_pretrained("demo")("a red ball", height=100)
