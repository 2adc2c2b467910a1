"""Upsamplers on disk: a folder as diffusers saves it, the published single files, and what is wrong with others."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from loras import write, write_header
from ltx2_cli.errors import UsageError
from ltx2_cli.models.networks import PRESETS, UPSAMPLERS
from ltx2_cli.models.upsampler import HINT, LatentUpsampler, LatentUpsamplerArch, open_upsampler
from ltx2_cli.models.video_vae import VideoVAEArch
from ltx2_cli.weights.declare import Scope, declared
from ltx2_cli.weights.load import load_weights
from ltx2_cli.weights.published import UPSAMPLER_FILES
from parity import adopt, published, randomise
from upsamplers import KINDS

MESH = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
SIZES = {"in_channels": 8, "mid_channels": 32, "num_blocks_per_stage": 2}
PLAIN = LatentUpsamplerArch(**SIZES, use_rational_resampler=False)
# the config in the metadata of the published spatial file of LTX-2.3, but for the sizes
EMBEDDED = {
    "_class_name": "LatentUpsampler",
    "dims": 3,
    "spatial_upsample": True,
    "temporal_upsample": False,
    "spatial_scale": 2.0,
    "rational_resampler": False,
    **SIZES,
}
VAE = VideoVAEArch(latent_channels=8, upsample_residual=(True, False, True))  # of no model version
LTX2_5 = "Lightricks/LTX-2.5/latent_upscale_models/ltx-2.5-latent"
KEYS = {
    "Lightricks/LTX-2/ltx-2-spatial-upscaler-x2-1.0.safetensors": "ltx2/latent_upsampler.tsv",
    "Lightricks/LTX-2/ltx-2-temporal-upscaler-x2-1.0.safetensors": "ltx2/temporal_upscaler_x2.tsv",
    "Lightricks/LTX-2.3/ltx-2.3-spatial-upscaler-x2-1.0.safetensors": "ltx2.3/spatial_upscaler_x2.tsv",
    "Lightricks/LTX-2.3/ltx-2.3-spatial-upscaler-x2-1.1.safetensors": "ltx2.3/spatial_upscaler_x2.tsv",
    "Lightricks/LTX-2.3/ltx-2.3-spatial-upscaler-x1.5-1.0.safetensors": "ltx2.3/spatial_upscaler_x1.5.tsv",
    "Lightricks/LTX-2.3/ltx-2.3-temporal-upscaler-x2-1.0.safetensors": "ltx2/temporal_upscaler_x2.tsv",
    f"{LTX2_5}-spatial-upscaler-x2-bf16-1.0.safetensors": "ltx2.3/spatial_upscaler_x2.tsv",
    f"{LTX2_5}-temporal-upscaler-x2-bf16-1.0.safetensors": "ltx2/temporal_upscaler_x2.tsv",
}


def shapes(arch: LatentUpsamplerArch) -> dict[str, tuple[int, ...]]:
    return declared(LatentUpsampler(Scope("float32"), arch))


def header(path: Path, arch: LatentUpsamplerArch = PLAIN, **config: object) -> Path:
    """A single file of an upsampler, with these values in its config, or without a config."""
    return write_header(path, shapes(arch), {"config": json.dumps(config)} if config else {"format": "pt"})


def refusal(opening: Callable[[], object]) -> UsageError:
    with pytest.raises(UsageError) as error:
        opening()
    assert "as the model" not in error.value.hint
    return error.value


@pytest.mark.parametrize("name", UPSAMPLERS)
def test_the_published_files_are_recognised_by_their_tensors(tmp_path, name):
    path = write_header(tmp_path / name.rpartition("/")[2], published(KEYS[name]))
    version = name.split("/")[1].lower().replace("-", "")
    arch, files = open_upsampler(path, PRESETS[version].vae)
    assert arch.upsampling == UPSAMPLERS[name].upsampling
    assert shapes(arch) == shapes(UPSAMPLERS[name]) == published(KEYS[name])
    assert {tensor.dtype for tensor in files.values()} == {"BF16"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_diffusers_saved_is_read(tmp_path, kind):
    reference = randomise(LTX2LatentUpsamplerModel(**SIZES, **KINDS[kind]), seed=2)
    reference.save_pretrained(tmp_path / "latent_upsampler")
    for path in (tmp_path, tmp_path / "latent_upsampler"):
        arch, files = open_upsampler(path, VAE)
        abstract = LatentUpsampler(Scope(jnp.float32), arch)
        loaded = load_weights(abstract, files, lambda weight: NamedSharding(MESH, PartitionSpec()))
        jax.tree.map(np.testing.assert_array_equal, loaded, adopt(abstract, reference.state_dict()))
    here = {each.relative_to(tmp_path).as_posix() for each in (tmp_path / "latent_upsampler").iterdir()}
    assert here <= set(UPSAMPLER_FILES)


def test_a_single_file_gives_the_same_with_and_without_a_config(tmp_path):
    stated = open_upsampler(header(tmp_path / "stated.safetensors", **EMBEDDED), VAE)
    bare = open_upsampler(header(tmp_path / "bare.safetensors"), VAE)
    assert stated[0] == bare[0] == PLAIN
    assert dict(stated[1]).keys() == dict(bare[1]).keys()


@pytest.mark.parametrize(
    "config",
    [
        {"spatial_upsample": False, "temporal_upsample": True},
        {"spatial_upsample": False, "temporal_upsample": True, "rational_resampler": True, "spatial_scale": 1.5},
    ],
    ids=["nothing", "something"],
)
def test_spatial_keys_of_a_temporal_upsampler_are_ignored(tmp_path, config):
    arch = LatentUpsamplerArch(**SIZES, spatial_upsample=False, temporal_upsample=True)
    opened, _ = open_upsampler(header(tmp_path / "a.safetensors", arch, **config), VAE)
    assert opened.upsampling == arch.upsampling


def test_without_a_resampler_in_the_config_the_tensors_decide(tmp_path):
    assert open_upsampler(header(tmp_path / "a.safetensors", mid_channels=32), VAE)[0] == PLAIN


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rational_resampler": True}, "the config says use_rational_resampler True, by its tensors it is False"),
        ({"spatial_scale": 1.5}, "the config says rational_spatial_scale 1.5, by its tensors it is 2.0"),
        ({"temporal_upsample": True}, "the config says temporal_upsample True, by its tensors it is False"),
        ({"mid_channels": 64}, "the config says mid_channels 64, by its tensors it is 32"),
        ({"num_blocks_per_stage": "2"}, "the config says num_blocks_per_stage '2', by its tensors it is 2"),
        ({"dims": 2}, "dims is 2, only 3 is"),
        ({"noise_conditioning": True}, "noise_conditioning is True, which is not known"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(tmp_path, changes, sentence):
    path = header(tmp_path / "a.safetensors", **{**EMBEDDED, **changes})
    error = refusal(lambda: open_upsampler(path, VAE))
    assert sentence in str(error)
    assert str(path) in str(error)


def test_all_faults_are_one_message(tmp_path):
    tensors = shapes(PLAIN) | {"final_conv.weight": (8, 32, 1, 1, 1), "vae.encoder": (3,)}
    del tensors["res_blocks.1.norm2.bias"]
    path = write_header(tmp_path / "a.safetensors", tensors, {"config": json.dumps({**EMBEDDED, "spatial_scale": 1.5})})
    error = refusal(lambda: open_upsampler(path, PRESETS["ltx2"].vae))
    for sentence in (
        "rational_spatial_scale 1.5, by its tensors it is 2.0",
        "1 missing: res_blocks.1.norm2.bias",
        "1 not known: vae.encoder",
        "final_conv.weight is 8x32x1x1x1, not 8x32x3x3x3",
        "upsamples latents of 8 channels, the model's have 128",
        "was trained on latents of ltx2.3, the model's are of ltx2",
    ):
        assert sentence in str(error)
    assert error.hint == HINT


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"initial_conv.weight": None}, "no latent upsampler: it has no `initial_conv.weight` of five"),
        ({"initial_conv.weight": (32, 8, 3, 3)}, "no latent upsampler: it has no `initial_conv.weight` of five"),
        ({"upsampler.0.weight": None}, "no known kind: with 32 channels, it has no `upsampler.0.weight` and no `upsam"),
        ({"upsampler.0.weight": (288, 32, 3, 3)}, "with 32 channels, `upsampler.0.weight` is 288x32x3x3"),
        ({"upsampler.0.weight": (128, 32, 3, 3, 3)}, "with 32 channels, `upsampler.0.weight` is 128x32x3x3x3"),
    ],
)
def test_keys_of_no_known_kind_are_refused(tmp_path, changes, sentence):
    tensors = {name: shape for name, shape in (shapes(PLAIN) | changes).items() if shape}
    path = write_header(tmp_path / "a.safetensors", tensors)
    assert sentence in str(refusal(lambda: open_upsampler(path, VAE)))


def test_widths_indivisible_by_the_groups_are_refused(tmp_path):
    path = header(tmp_path / "a.safetensors", LatentUpsamplerArch(8, 48, 1))
    assert "mid_channels is 48, only multiples of 32 are" in str(refusal(lambda: open_upsampler(path, VAE)))


def test_unreadable_files_are_refused(tmp_path):
    whole = write(
        tmp_path / "whole.safetensors", {name: np.zeros(shape, "f4") for name, shape in shapes(PLAIN).items()}
    )
    cut, pointer, foreign = (tmp_path / f"{name}.safetensors" for name in ("cut", "pointer", "foreign"))
    cut.write_bytes(whole.read_bytes()[:-5])
    pointer.write_text("version https://git-lfs.github.com/spec/v1\n")
    write_header(foreign, shapes(PLAIN), {"config": "[1]"})
    for path, sentence in (
        (cut, "damaged or cut short"),
        (pointer, "is a Git LFS pointer"),
        (foreign, "the config in its metadata is not a JSON object"),
        (tmp_path / "none.safetensors", "is no folder and no safetensors file"),
        (tmp_path / "whole", "is no folder and no safetensors file"),
    ):
        assert sentence in str(refusal(partial(open_upsampler, path, VAE)))
    assert load_file(whole).keys() == open_upsampler(whole, VAE)[1].keys()


def test_a_folder_is_refused_with_all_missing_files(tmp_path):
    error = refusal(lambda: open_upsampler(tmp_path, VAE))
    assert "config.json is missing" in str(error)
    assert "holds no weights" in str(error)
    assert error.hint == HINT


def test_a_folder_of_several_files_needs_one_name(tmp_path):
    for name in ("ltx-2-temporal-upscaler-x2-1.0", "ltx-2-spatial-upscaler-x2-1.0"):
        header(tmp_path / f"{name}.safetensors")
    error = refusal(lambda: open_upsampler(tmp_path, VAE))
    assert "holds single files: ltx-2-spatial-upscaler-x2-1.0.safetensors, ltx-2-temporal" in str(error)
    assert error.hint == f"name one: --upsampler {tmp_path}/ltx-2-spatial-upscaler-x2-1.0.safetensors"
