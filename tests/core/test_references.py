"""Clips that follow references of an in-context LoRA, against diffusers from the same folder, references and noise."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from diffusers import LTX2InContextPipeline
from diffusers.pipelines.ltx2 import pipeline_ltx2_ic_lora
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition
from PIL import Image

from clips import ALL_ON, Checkpoint, final_latents, plan_of, reference
from core.test_conditions import With, drawn, errors, with_noise
from live_bytes import LiveBytes, check_live_bytes
from loras import ORIGINAL, write_lora
from ltx2_cli import resolve
from ltx2_cli.artifacts.outputs import Product
from ltx2_cli.core.components import Components
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import open_components
from ltx2_cli.core.write import write
from ltx2_cli.errors import UsageError
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import InitialLatents
from ltx2_cli.runs.summary import request_rows
from media.test_videos import write_lossless
from parity import randomise

SIZE = ALL_ON.size._replace(height=64, width=128)
CASE = ALL_ON._replace(size=SIZE, steps=2, video=(3.0, 0.0, 1.0, 0.7), audio=(7.0, 0.0, 1.0, 0.4))


class Files:
    """A LoRA that follows references of half the size, here added not at all, and what it may follow."""

    def __init__(self, folder: Path, checkpoint: Checkpoint):
        random = np.random.default_rng(9)
        metadata = {"reference_downscale_factor": "2"}
        self.lora = write_lora(folder / "in-context.safetensors", checkpoint.pipeline, ORIGINAL, 6, metadata)
        self.frames = random.integers(0, 256, (17, 64, 128, 3), np.uint8)
        self.video = write_lossless(folder / "video.mov", self.frames)
        self.picture = folder / "picture.png"
        Image.fromarray(random.integers(0, 256, (60, 100, 3), np.uint8)).save(self.picture)
        # So nearly white that diffusers, too, does not leave it out: each token has a share of its own.
        self.light = np.where(random.random((17, 64, 128, 1)) < 0.03, 254, 255).astype(np.uint8)
        self.light[9:, :, :64] = 0
        self.mask = write_lossless(folder / "mask.mov", self.light.repeat(3, axis=-1))


@pytest.fixture(scope="module")
def files(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("references"), checkpoint)


def following(checkpoint: Checkpoint, files: Files, *conditions: dict[str, object], **others: object) -> Plan:
    return plan_of(checkpoint, CASE, 5, conditions=list(conditions), lora=[f"{files.lora}:0"], **others)


def check(checkpoint: Checkpoint, plan: Plan, patch: pytest.MonkeyPatch, **arguments: object) -> None:
    checkpoint.pipeline.tokenizer.padding_side = "left"
    parts = {name: part for name, part in checkpoint.pipeline.components.items() if name != "duration_head"}
    pipeline = LTX2InContextPipeline(**parts)
    pipeline.set_progress_bar_config(disable=True)
    with_noise(patch, pipeline_ltx2_ic_lora, *drawn(plan))
    latents = reference(With(pipeline, reference_downscale_factor=2, **arguments), CASE, 5, "latent")
    assert max(errors(plan, pipeline, latents)) <= 2e-4


def followed(files: Files, strength: float = 0.8) -> list[LTX2ReferenceCondition]:
    frames = [Image.fromarray(frame) for frame in files.frames]
    return [LTX2ReferenceCondition(frames, strength), LTX2ReferenceCondition(Image.open(files.picture))]


def test_references_equal_those_of_the_reference(
    checkpoint: Checkpoint, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A video and a picture, half of the clip's size, behind a picture that is shown."""
    plan = following(
        checkpoint,
        files,
        {"path": str(files.video), "kind": "reference", "strength": 0.8},
        {"path": str(files.picture), "frame": 9, "strength": 0.7},
        {"path": str(files.picture), "kind": "reference"},
        image_crf=0,
    )
    assert plan.stages[0].geometry.token_counts == (24, 8, 6, 2)
    shown = LTX2VideoCondition(Image.open(files.picture), 2, 0.7, 0)
    check(checkpoint, plan, monkeypatch, conditions=[shown], reference_conditions=followed(files))


def test_noise_is_drawn_behind_that_of_a_file(checkpoint: Checkpoint, files: Files, tmp_path: Path) -> None:
    plan = following(checkpoint, files, {"path": str(files.video), "kind": "reference"}, noise=tmp_path / "noise")
    assert plan.stages[0].noise
    assert plan.stages[0].draws_noise


def test_references_have_whole_latents(checkpoint: Checkpoint, files: Files) -> None:
    asked = {"conditions": [{"path": str(files.picture), "kind": "reference"}], "lora": [str(files.lora)]}
    with pytest.raises(UsageError, match="references of 1/2 of 96x64 do not divide into") as refusal:
        plan_of(checkpoint, ALL_ON, 5, **asked)
    assert refusal.value.hint == "nearest, of the first stage: 128x64"


def test_shares_need_tokens_that_are_traded_for_heads(checkpoint: Checkpoint, files: Files) -> None:
    mesh = {"profile": "ironwood", "mesh": {"passes": 2, "tokens": 4, "heads": 1}}
    sentence = "2 attention heads do not divide by the 4 devices that split the tokens, which references"
    with pytest.raises(UsageError, match=sentence):
        by_shares(checkpoint, files, files.video, sharding=mesh)


def by_shares(checkpoint: Checkpoint, files: Files, path: Path, strength: float = 0.9999, **others: object) -> Plan:
    conditions = (
        {"path": str(files.mask), "kind": "mask"},
        {"path": str(path), "kind": "reference", "strength": 0.8},
        {"path": str(files.picture), "kind": "reference"},
    )
    return following(checkpoint, files, *conditions, reference_strength=strength, **others)


def test_shares_of_attention_equal_those_of_the_reference(
    checkpoint: Checkpoint, files: Files, monkeypatch: pytest.MonkeyPatch, compilations: list[str]
) -> None:
    """Then others by the same programs."""
    light = torch.tensor(files.light[..., 0]).float()[None, None] / 255
    asked = {"conditioning_attention_strength": 0.9999, "conditioning_attention_mask": light}
    plan = by_shares(checkpoint, files, files.video)
    assert [text for name, text in request_rows(plan, ()) if name == "follows"] == [
        f"where mask {files.mask} is white",
        f"reference {files.video}, 17 frames at 1/2 of the size, strength 0.8",
        f"reference {files.picture}, an image at 1/2 of the size, strength 1",
        "with 0.9999 of the attention",
    ]
    check(checkpoint, plan, monkeypatch, reference_conditions=followed(files), **asked)
    compilations.clear()
    final_latents(by_shares(checkpoint, files, files.mask, strength=0.25, compat="ltx-core"))
    assert compilations == []


@pytest.mark.slow
def test_a_second_stage_has_neither_references_nor_their_lora(
    checkpoint: Checkpoint, files: Files, tmp_path: Path
) -> None:
    """Its denoiser is loaded when that of the first stage has left."""
    config = {"in_channels": 8, "mid_channels": 32, "num_blocks_per_stage": 1}
    randomise(LTX2LatentUpsamplerModel(**config), seed=1).save_pretrained(tmp_path / "up")
    second = {"recipe": "two_stage", "second_stage.upsampler": str(tmp_path / "up"), "second_stage.lora": []}
    followed = {"path": str(files.video), "kind": "reference"}
    case = CASE._replace(size=SIZE._replace(height=128))
    other = f"{write_lora(tmp_path / 'style.safetensors', checkpoint.pipeline, ORIGINAL, 7)}:0.5"
    plan = plan_of(checkpoint, case, 5, conditions=[followed], lora=[str(files.lora), other], **second)
    assert [stage.geometry.token_counts for stage in plan.stages] == [(12, 0, 3), (48, 0)]
    assert [len(stage.placed_videos) for stage in plan.stages] == [1, 0]
    components, report = Components(plan), Report()
    plain = Components(plan_of(checkpoint, case, 5, lora=[other], **second))  # which both stages have
    with components.use("transformer", report) as first, plain.use("transformer", report) as wanted:
        assert not same(first, wanted)
        with components.use("refiner", report) as refiner:
            assert same(refiner, wanted)
    saved = {"save_latents": str(tmp_path / "latents.safetensors"), "num_inference_steps": 1}
    spec = replace(plan.spec, **saved)
    list(write(plan := resolve(spec), open_components(plan), report := LiveBytes(report), Product.latents))
    check_live_bytes(plan, report.samples)
    source = InitialLatents(plan.stages[0].shapes, plan.spec.fps)
    alone = plan_of(checkpoint, case, 5, lora=[str(files.lora), other], source=source, **second)
    assert (len(alone.stages), alone.stages[0].placed_videos, alone.reload_stage2) == (1, (), True)


def same(one: object, other: object) -> bool:
    return all(map(np.array_equal, *map(jax.tree.leaves, (one, other))))
