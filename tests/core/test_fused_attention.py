"""A clip with the attention kernel of TPUs, interpreted, on eight devices: that of plain attention."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ltx2_cli import read_spec, resolve
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import START, open_components, run_phases
from ltx2_cli.request.spec import AttentionBackend, Streams
from model_versions import LTX2_3, random_folder

TOKENS = 1152  # of the video: nine times 128
CLIP = {"height": 768, "width": 768, "num_frames": 9, "num_inference_steps": 1, "seed": 1, "max_sequence_length": 140}


def latents(folder: Path, attention: str) -> Streams[np.ndarray]:
    float32 = {"dtype": "float32", "text_encoder_dtype": "float32"}
    sharded = {"sharding.profile": "ironwood", "sharding.attention": attention}
    plan = resolve(read_spec({**CLIP, **float32, **sharded}, model=str(folder), prompt="a red ball bounces"))
    assert {stage.sharding.attention for stage in plan.stages} == {AttentionBackend(attention)}
    assert plan.stages[0].geometry.video_tokens == TOKENS
    *_, state = run_phases(plan, START, open_components(plan), Report())
    return state.latents


@pytest.mark.slow
def test_the_fused_kernel_makes_the_clip_of_plain_attention(tmp_path: Path) -> None:
    """Kernels with gates and without, splash among them, are compared alone and over meshes in tests/nn."""
    folder = random_folder(replace(LTX2_3, transformer=replace(LTX2_3.transformer, num_layers=2)), tmp_path)
    plain, fused = (latents(folder, attention) for attention in ("xla", "fused"))
    for stream, wanted in zip(fused, plain, strict=True):
        assert np.linalg.norm(stream - wanted) <= 1e-5 * np.linalg.norm(wanted)
