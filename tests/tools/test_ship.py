"""The embedded checkpoint: complete, and the same clip in diffusers."""

from pathlib import Path

import torch
from diffusers import LTX2Pipeline
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

from clips import ALL_ON, Checkpoint, Size, check_latents, check_media
from ltx2_cli.models.open_checkpoint import open_folder
from ltx2_cli.models.upsampler import open_upsampler
from ltx2_cli.plan.request_warnings import read_trained_on
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.hub import DEMO_FOLDER
from ltx2_cli.weights.published import UPSAMPLER
from tools.train_demo.arch import ARCH, UPSAMPLER_ARCH
from tools.train_demo.ship import write_trained_on

CASE = ALL_ON._replace(size=Size(9, 64, 64, 24.0), steps=2, prompt="A red ball bounces, a low note.")


def test_the_shipped_model_is_complete_small_and_bfloat16() -> None:
    found = open_folder(DEMO_FOLDER)
    assert found.arch == ARCH
    assert open_upsampler(DEMO_FOLDER, ARCH.vae)[0] == UPSAMPLER_ARCH
    upsampler = TensorFiles(DEMO_FOLDER / UPSAMPLER)
    stored = {tensor.dtype for network in (*found.files.values(), upsampler) for tensor in network.values()}
    assert stored == {"BF16"}
    assert sum(file.stat().st_size for file in DEMO_FOLDER.rglob("*") if file.is_file()) < 30e6


def test_diffusers_loads_the_shipped_model_and_makes_the_same_clip(tmp_path: Path) -> None:
    checkpoint = Checkpoint(DEMO_FOLDER, LTX2Pipeline.from_pretrained(DEMO_FOLDER, torch_dtype=torch.float32))
    check_latents(checkpoint, CASE, tmp_path)
    check_media(checkpoint, CASE, 48_000, tmp_path)
    _, said = LTX2LatentUpsamplerModel.from_pretrained(DEMO_FOLDER / UPSAMPLER, output_loading_info=True)
    assert not any(said.values())


def test_the_shipped_list_of_training_clips_is_that_of_the_tool(tmp_path: Path) -> None:
    write_trained_on(tmp_path)
    assert read_trained_on(tmp_path) == read_trained_on(DEMO_FOLDER)
