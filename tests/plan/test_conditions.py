"""References and the LoRAs that follow them; masks, and what of them a latent covers."""

from pathlib import Path

import numpy as np
import pytest

from loras import keys, write_header
from ltx2_cli.errors import UsageError
from ltx2_cli.plan.conditions import read_input_videos, with_reference_scale
from ltx2_cli.plan.inputs import Loras
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.weights.lora import open_lora
from media.test_videos import write_lossless

SHAPES = keys({"diffusion_model.transformer_blocks.3.attn1.to_q": (8, 8)}, 4)


def lora(folder: Path, name: str, **metadata: str) -> Loras:
    return [(open_lora(write_header(folder / f"{name}.safetensors", SHAPES, metadata)), 1.0)]


def spec_of(folder: Path, *kinds: str, **others: object) -> RunSpec:
    frames = np.broadcast_to(6 * np.arange(41, dtype=np.uint8)[:, None, None, None], (41, 8, 8, 3))
    video = write_lossless(folder / "v.mov", np.ascontiguousarray(frames))
    return read_spec(prompt="rain", conditions=[{"path": str(video), "kind": kind, **others} for kind in kinds])


def test_a_request_knows_how_large_its_references_are(tmp_path: Path) -> None:
    """The LoRA says it, unless the request does; a reference of a third of the rate has a third of the frames."""
    loras = lora(tmp_path, "a", reference_downscale_factor="2", reference_temporal_scale_factor="3")
    spec = with_reference_scale(spec_of(tmp_path, "video", "reference", "mask"), loras)
    assert [(of.downscale, of.temporal_scale) for of in spec.conditions] == [(None, None), (2, 3), (2, 3)]
    read = read_input_videos(spec)
    assert [len(picture.frames) for picture in read] == [41, 9, 9]
    assert read[1].frames[:, 0, 0, 0].tolist() == [18 * number for number in range(9)]  # every third of the first
    stated = with_reference_scale(spec_of(tmp_path, "reference", downscale=4), loras)
    assert (stated.conditions[0].downscale, stated.conditions[0].temporal_scale) == (4, 3)
    assert with_reference_scale(spec_of(tmp_path, "video"), []) == spec_of(tmp_path, "video")


def test_references_need_their_lora_and_it_needs_them(tmp_path: Path) -> None:
    twice, once = lora(tmp_path, "twice", reference_downscale_factor="2"), lora(tmp_path, "ic-lora")
    refused = [
        ("twice.safetensors was trained to follow a reference, and none is given", (), twice),
        ("nothing follows the reference .*: no in-context LoRA is given", ("reference",), lora(tmp_path, "style")),
        ("twice.safetensors and ic-lora.safetensors follow references of diff", ("reference",), [*twice, *once]),
    ]
    for sentence, kinds, loras in refused:
        with pytest.raises(UsageError, match=sentence):
            with_reference_scale(spec_of(tmp_path, *kinds), loras)


def test_a_mask_is_a_picture_or_as_long_as_the_references(tmp_path: Path) -> None:
    short = write_lossless(tmp_path / "short.mov", np.zeros((9, 8, 8, 3), np.uint8))
    spec = spec_of(tmp_path, "reference")
    conditions = [*map(vars, spec.conditions), {"path": str(short), "kind": "mask"}]
    with pytest.raises(UsageError, match="the mask of the references has 9 frames, and a reference 41"):
        read_input_videos(read_spec(prompt="rain", conditions=conditions))
