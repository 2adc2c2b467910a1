"""A clip made in three parts, on arrays of diffusers' shapes and scales."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from clips import ALL_ON, NEGATIVE, TEXT_TOKENS, Checkpoint, reference
from ltx2_cli import LTX2
from ltx2_cli.errors import UsageError
from ltx2_cli.request.spec import Streams
from ltx2_cli.runs.pipeline import ClipLatents
from parity import relative_error
from tiny import draw_noise

FLOAT32 = {"dtype": "float32", "text_encoder_dtype": "float32", "max_sequence_length": TEXT_TOKENS}
NAMES = ("guidance_scale", "stg_scale", "modality_scale", "guidance_rescale")
SMALL = {
    **dict(zip(NAMES, ALL_ON.video, strict=True)),
    **{f"audio_{name}": scale for name, scale in zip(NAMES, ALL_ON.audio, strict=True)},
    "negative_prompt": NEGATIVE,
    "num_frames": ALL_ON.size.num_frames,
    "height": ALL_ON.size.height,
    "width": ALL_ON.size.width,
    "frame_rate": ALL_ON.size.fps,
    "num_inference_steps": ALL_ON.steps,
    "spatio_temporal_guidance_blocks": list(ALL_ON.stg_blocks),
    "generator": 5,
}


@pytest.fixture
def model(checkpoint: Checkpoint) -> LTX2:
    return LTX2.from_pretrained(str(checkpoint.folder), compat="diffusers", keep_resident=True, **FLOAT32)


def test_latents_are_those_of_the_reference(model: LTX2, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """From the same noise; and both programs decode the other's."""
    noise = tmp_path / "noise.safetensors"
    save_file(draw_noise(checkpoint.pipeline, 5, *ALL_ON.size), noise)
    model.values = {**model.values, "initial_noise": str(noise)}
    wanted = reference(checkpoint.pipeline, ALL_ON, 5, "latent")
    contexts = model.encode(ALL_ON.prompt, **SMALL)
    assert [each.shape[:2] for each in contexts["connectors"]] == [(2, TEXT_TOKENS)] * 2
    latents = model.denoise("another prompt", contexts, **SMALL)
    for got, theirs in zip(latents, wanted, strict=True):
        assert relative_error(got, theirs) <= 1e-4
    del model.values["initial_noise"]
    decoded = model.decode(ClipLatents(*(each.numpy() for each in wanted)))
    frames = checkpoint.pipeline.vae.decode(torch.tensor(latents.video), None, return_dict=False)[0]
    frames = checkpoint.pipeline.video_processor.postprocess_video(frames.detach(), output_type="np")
    assert np.abs(decoded.frames / 255 - frames).max() <= 1.01 / 255


def test_parts_make_the_clips_of_a_call(model: LTX2, checkpoint: Checkpoint) -> None:
    two = {**SMALL, "num_videos_per_prompt": 2}
    whole = model(ALL_ON.prompt, **two)
    parts = model.decode(model.denoise(ALL_ON.prompt, **two), frame_rate=ALL_ON.size.fps, generator=5)
    assert parts.frames.shape == whole.frames.shape
    assert np.abs(parts.frames.astype(int) - whole.frames).max() <= 1
    np.testing.assert_allclose(parts.audio, whole.audio, atol=1e-4)
    alone = LTX2.from_pretrained(str(checkpoint.folder), streams="video", **FLOAT32)
    latents = alone.denoise(ALL_ON.prompt, **SMALL)
    assert latents.audio.size == 0
    assert alone.decode(latents).audio.size == 0


def test_other_shapes_are_refused(model: LTX2) -> None:
    latents = model.denoise(ALL_ON.prompt, **SMALL)
    with pytest.raises(UsageError, match=r"the audio latents are .*, not .*") as refused:
        model.decode(latents, frame_rate=12)
    assert refused.value.hint == "at the `frame_rate` of the clip"
    with pytest.raises(UsageError, match="the video latents are"):
        model.decode(latents._replace(video=latents.video[:, :3]))
    contexts = model.encode(ALL_ON.prompt, **SMALL)
    one = {name: Streams(*(each[:1] for each in streams)) for name, streams in contexts.items()}
    for wrong in (one, {"refiner_connectors": contexts["connectors"]}):
        with pytest.raises(UsageError, match=r"the contexts of `connectors` are .*, not ") as refused:
            model.denoise(ALL_ON.prompt, wrong, **SMALL)
        assert refused.value.hint == "from `encode` with the same arguments"
