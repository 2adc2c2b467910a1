"""Clips by the diffusion decoder: equal to diffusers', the same on all devices, and made by every command."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from PIL import Image
from safetensors.numpy import load_file, save_file

from diffusion_decoders import TINY, decoded, diffusion_decoder, write_published
from ltx2_cli import read_spec, resolve
from ltx2_cli.core.components import Components
from ltx2_cli.core.decode import decode
from ltx2_cli.core.decode_pixel_tiles import TileBlend, tile_programs
from ltx2_cli.core.report import Report
from ltx2_cli.diffusion.latents import pixel_noise_key
from ltx2_cli.errors import UsageError
from ltx2_cli.media.videos import read_whole_video
from ltx2_cli.models.diffusion_decoder import from_patches
from ltx2_cli.plan.axis_tiling import tile_axis
from ltx2_cli.plan.pixel_tiles import PixelTiles
from ltx2_cli.plan.resolve import Plan, plan_offline
from ltx2_cli.request.spec import Streams
from ltx2_cli.weights.published import DIFFUSION_DECODER, DIFFUSION_DECODER_FILE
from model_versions import LTX2_5, random_folder
from program import run_program
from split_files import split

EIGHT = {"profile": "gpu", "mesh": {"passes": 4, "heads": 2}}
SEED = 5
# A row of latents is high enough for these windows: tiles of the published size have few tokens.
LOW: dict[str, Any] = {
    "decoder_stage_kernels": ((3, 1, 3), (3, 1, 5), (3, 1, 3), (3, 1, 3)),
    "decoder_stage5_kernel": (3, 1, 3),
    "decoder_stage_depths": (1, 1, 1, 1, 1),
    "decoder_num_inference_steps": 2,  # with one, the reference draws other noise for each tile
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = random_folder(LTX2_5, tmp_path_factory.mktemp("folder"))
    diffusion_decoder(**LOW).save_pretrained(place / DIFFUSION_DECODER)
    return place


def plan_of(model: Path, frames: int, height: int, width: int, **keys: object) -> Plan:
    size = {"num_frames": frames, "height": height, "width": width, "recipe": "one_stage", "streams": "video"}
    exact = {"dtype": "float32", "decoder": "diffusion", "prompt": "rain", "seed": SEED}
    return resolve(read_spec({"model": str(model), **size, **exact, **keys}))


def latents_for(plan: Plan) -> np.ndarray:
    _, channels, *size = plan.latent_shapes.video
    return np.random.default_rng(3).standard_normal((plan.spec.num_videos, *size, channels)).astype(np.float32)


def frames_of(plan: Plan) -> np.ndarray:
    latents = latents_for(plan)
    tokens = Streams(latents.reshape(len(latents), -1, latents.shape[-1]), np.zeros((len(latents), 0, 1), np.float32))
    clips = decode(plan, tokens, plan.seeds, Components(plan), Report(), Streams(True, False))
    return np.stack([clip.frames for clip in clips])


def noise_for(plan: Plan, frames: int) -> np.ndarray:
    """The noise of the first video's pixels: a draw for each frame."""
    arch, key = plan.networks.diffusion_decoder.arch, pixel_noise_key(np.uint32(plan.seeds[0]))
    grid = plan.spec.height // arch.patch_size, plan.spec.width // arch.patch_size, arch.patch_features
    patches = [jax.random.normal(jax.random.fold_in(key, frame), grid, np.float32) for frame in range(frames)]
    return np.asarray(from_patches(jnp.stack(patches)[None], arch.patch_size))


def reference_for(model: Path, plan: Plan, **tiling: int) -> np.ndarray:
    """Levels of diffusers' pixels; with `tiling`, in tiles."""
    reference = diffusion_decoder(**LOW)
    if tiling:
        reference.enable_tiling(**tiling)
    pixels = decoded(reference, latents_for(plan)[:1], noise_for(plan, plan.num_frames))
    return np.clip((pixels + 1) / 2, 0, 1) * 255


def test_a_folder_without_a_diffusion_decoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no diffusion decoder: .*diffusion_decoder"):
        plan_of(random_folder(LTX2_5, tmp_path / "model"), 9, 32, 96)


def test_programs_of_the_published_size_make_pixels_of_bfloat16() -> None:
    """Eight of the twelve tiles of 1920x1088 at a time."""
    asked = {"model": "ltx2.5", "prompt": "rain", "decoder": "diffusion", "dtype": "bfloat16", "sharding": EIGHT}
    plan = plan_offline(read_spec({**asked, "width": 1920, "height": 1088, "num_frames": 121}), jax.devices())
    assert plan.decoding.tiles.counts == (2, 2, 3)
    _, tile = tile_programs(plan)
    pixels, finite = tile.outputs()
    assert (pixels.shape, pixels.dtype) == ((1, 8, 73, 576, 688 * 3), np.dtype("bfloat16"))
    assert finite.shape == (1, 8)


def test_bfloat16_makes_nearly_the_clip_of_float32(folder: Path) -> None:
    exact, rounded = (frames_of(plan_of(folder, 9, 32, 96, dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert np.abs(exact.astype(int) - rounded).mean() < 2


def test_a_clip_equals_the_reference(folder: Path) -> None:
    plan = plan_of(folder, 9, 64, 160)
    assert plan.decoding.tiles.counts == (1, 1, 1)
    wanted = reference_for(folder, plan)
    assert np.std(wanted) > 15  # not clipped to nothing
    np.testing.assert_allclose(frames_of(plan), wanted, atol=0.52)


@pytest.mark.slow
def test_tiles_beside_each_other_are_blended_as_the_reference_blends_them(folder: Path) -> None:
    plan = plan_of(folder, 9, 32, 832)
    assert plan.decoding.tiles.counts == (1, 1, 2)
    wanted = reference_for(folder, plan, tile_sample_min_width=448, tile_sample_stride_width=384)
    np.testing.assert_allclose(frames_of(plan), wanted, atol=0.52)


@pytest.mark.slow
def test_tiles_behind_each_other_join_without_a_seam(folder: Path) -> None:
    """Frames that one tile alone makes are those of the whole clip. Where two overlap, frames at the edge of a tile
    have their windows moved inward, and the least weight."""
    plan = plan_of(folder, 97, 32, 96)
    assert plan.decoding.tiles.counts == (2, 1, 1)
    (size, (_, second)), *_ = plan.decoding.tiles.pixel_axes()
    assert size - second >= 23
    whole = PixelTiles(plan.decoding.tiles.arch, tuple(tile_axis(length, 1, 0, 0) for length in (49, 4, 12)))
    got, wanted = (frames_of(each) for each in (plan, replace(plan, decoding=replace(plan.decoding, tiles=whole))))
    got, wanted = got.astype(int), wanted.astype(int)
    reach = 8  # frames that the layers of a tile look over its edge
    alone = [*range(second), *range(size + reach, 97)]
    np.testing.assert_allclose(got[0, alone], wanted[0, alone], atol=1)
    changes = np.abs(np.diff(wanted[0], axis=0)).mean()
    assert np.abs(got - wanted).mean() < 0.1 * changes


@pytest.mark.parametrize("videos", [1, 3])
def test_eight_devices_decode_the_same_clips_as_one(folder: Path, videos: int) -> None:
    size = 1, 32, 832
    plan = plan_of(folder, *size, num_videos=videos, sharding=EIGHT)
    assert tuple(plan.decoding.mesh.shape.values()) == ((1, 1, 1, 8) if videos == 1 else (4, 1, 1, 2))
    alone = frames_of(plan_of(folder, *size, num_videos=videos))
    assert np.abs(frames_of(plan).astype(int) - alone).max() <= 1
    assert len(np.unique(alone.reshape(videos, -1), axis=0)) == videos


@pytest.mark.parametrize("outer", ["", "vae."])
def test_the_published_file_decodes_as_the_folder(
    folder: Path, outer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "ltx-2.5-22b-distilled-transformer-bf16.safetensors"
    model = split(folder, LTX2_5, tmp_path, name)
    place = write_published(diffusion_decoder(**LOW), tmp_path, outer)
    stored = load_file(place)
    config = {"vae": {**TINY, **LOW, "_class_name": "CausalVideoAutoencoder", "dims": 3}}
    save_file(stored, place, {"config": json.dumps(config)})
    plan, other = plan_of(model, 9, 32, 96), plan_of(folder, 9, 32, 96)
    assert plan.networks.diffusion_decoder.arch == replace(other.networks.diffusion_decoder.arch, gated=True)
    assert np.abs(frames_of(plan).astype(int) - frames_of(other)).max() <= 1
    for described in (place, folder / DIFFUSION_DECODER):
        assert run_program(monkeypatch, "info", str(described)) == 0
        assert re.match("diffusion decoder", capsys.readouterr().out)
    place.unlink()
    save_file(stored | {f"{outer}decoder.conv_more.weight": stored[f"{outer}decoder.conv_in.weight"]}, place)
    with pytest.raises(UsageError, match=r"does not hold this diffusion decoder: .*missing|.*not known"):
        plan_of(model, 9, 32, 96)
    place.unlink()
    with pytest.raises(UsageError, match=rf"no folder and no repository is called .*{DIFFUSION_DECODER_FILE}"):
        plan_of(model, 9, 32, 96)


def test_weights_of_tiles_add_up_to_one(folder: Path) -> None:
    tiles = plan_of(folder, 257, 800, 1600).decoding.tiles
    assert tiles.counts == (5, 2, 3)
    tiles = PixelTiles(tiles.arch, (tile_axis(23, 5, 0, 3), tile_axis(7, 2, 0, 1), tile_axis(10, 3, 0, 2)))
    blend = TileBlend(tiles)
    shape = [size for size, _ in tiles.pixel_axes()]
    for number in range(len(tiles.starts)):
        blend.add(number, np.full((shape[0], shape[1], shape[2] * 3), 0.5, np.float32))
    frames = blend.frames()
    assert frames.shape == (45, 56, 80, 3)
    assert np.unique(frames).tolist() == [191]


@pytest.mark.slow
def test_commands_make_the_same_clip(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    size = ["--height=32", "--width=96", "--num-frames=9", "--no-audio", "--steps=1", "--recipe=one_stage"]
    off = [f"--{kind}={value}" for kind, value in (("guidance-scale", 1), ("stg-scale", 0), ("modality-scale", 1))]
    words = ["--model", str(folder), *size, *off, "--seed=7", "--num-videos=2", "--set", "max_sequence_length=32"]
    made = ["generate", "rain", *words, "--decoder=diffusion", "-o", "a.mp4", "--save-latents", "a.safetensors"]
    assert run_program(monkeypatch, *made) == 0
    clips = sorted(tmp_path.glob("a*.mp4"))
    assert len(clips) == 2
    assert yaml.safe_load(clips[1].with_suffix(".yaml").read_text())["decoder"] == "diffusion"
    (latents,) = (path for path in tmp_path.glob("a*.safetensors") if clips[1].stem.removeprefix("a") in path.stem)
    for options in ([], ["--decoder", "convolution"]):
        assert run_program(monkeypatch, "decode", str(latents), *options, "-o", "b.mp4", "--force") == 0
        same = np.array_equal(read_whole_video(Path("b.mp4")).frames, read_whole_video(clips[1]).frames)
        assert same == (not options)
    assert run_program(monkeypatch, "decode", str(latents), "-o", "b.mkv") == 0
    assert run_program(monkeypatch, "decode", str(latents), "-o", "frames/") == 0
    raw = subprocess.run(
        [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", "b.mkv", "-f", "rawvideo", "-pix_fmt", "rgb48le", "-"],
        capture_output=True,
        check=True,
    ).stdout
    deep = np.frombuffer(raw, "<u2").reshape(9, 32, 96, 3)
    levels = np.stack([np.asarray(Image.open(path)) for path in sorted(Path("frames").iterdir())])
    assert np.abs(deep / 257 - levels).max() < 0.51
    assert (deep % 257 > 0).mean() > 0.9  # between the levels of 8 bits
    assert run_program(monkeypatch, "replay", str(clips[1]), "--verify") == 0
    capsys.readouterr()
    assert run_program(monkeypatch, "info", str(clips[1])) == 0
    assert re.search(r"^decoder +diffusion$", capsys.readouterr().out, re.MULTILINE)
    assert run_program(monkeypatch, *made, "--dry-run", "--force", "--set", "vae_memory_gb=1e-6") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"decode by diffusion, about \d", said)
    assert "vae_memory_gb changes nothing, " in said
    assert "that has 1 kB for it; --decoder convolution" in said


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (["ltx2.3", "--width=128"], "is ltx2.3, and LTX-2.5 alone has a diffusion decoder", "--decoder convolution"),
        (["", "--width=64"], "64x32 is too small for the diffusion decoder", "at least 96x32"),
    ],
)
def test_what_it_cannot_decode_is_refused(
    words: list[str],
    said: str,
    hint: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, width = words
    size = [width, "--height=32", "--num-frames=9", "--recipe=one_stage"]
    command = ["generate", "rain", "--model", model or str(folder), *size, "--decoder=diffusion", "--dry-run"]
    assert run_program(monkeypatch, *command) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert said in error
    assert hint in error
