"""The releases by their configs alone: the tensors that they mean are those of the published files."""

import math
from hashlib import md5
from itertools import product

import jax.numpy as jnp
import pytest

from ltx2_cli.errors import UsageError
from ltx2_cli.models.arch import Arch
from ltx2_cli.models.config import LAYOUTS, RENAMINGS
from ltx2_cli.models.gemma import Gemma
from ltx2_cli.models.networks import BUILDERS, PRESETS, READERS, UPSAMPLERS, preset_checkpoint
from ltx2_cli.models.upsampler import LatentUpsampler
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.weights.declare import Scope, declared, weights
from ltx2_cli.weights.published import CATALOG, IN_PACKAGE, MODEL_KIND
from parity import published

# The denoiser of LTX-2.5 is compared with that of LTX-2.3 in test_transformer.py.
PUBLISHED = [pair for pair in product(PRESETS, BUILDERS) if pair != ("ltx2.5", "transformer")]


@pytest.mark.parametrize(("release", "network"), PUBLISHED)
def test_names_and_shapes_equal_the_published_ones(release: str, network: str):
    folder = "ltx2" if network == "audio_vae" else LAYOUTS.get(release, release)  # it is the same in all
    arch = vars(PRESETS[release])[network]
    assert declared(BUILDERS[network](Scope(jnp.bfloat16), arch)) == published(f"{folder}/{network}.tsv")


@pytest.mark.parametrize("release", PRESETS)
def test_every_value_is_valid_and_of_one_model_version(release: str):
    arch: Arch = PRESETS[release]
    assert arch.model_version == release
    for name in READERS:
        network = vars(arch)[name]
        assert not list(network.conflicts())
        assert network.model_version in (release, LAYOUTS.get(release), None)


def test_the_text_encoder_is_the_language_model_of_gemma_3_12b():
    """Its parameters: embeddings 262208·3840; 48 layers of q, o 4096·3840, k, v 2048·3840, three MLP matrices
    15360·3840, two head norms of 256 and four norms of 3840; the last norm."""
    layer = 3840 * (2 * 4096 + 2 * 2048 + 3 * 15360) + 2 * 256 + 4 * 3840
    networks = preset_checkpoint("Lightricks/LTX-2").networks(read_spec(prompt="rain"))
    shapes = (weight.get_value().shape for weight in weights(networks.text_encoder))
    assert sum(map(math.prod, shapes)) == 262208 * 3840 + 48 * layer + 3840 == 11_766_034_176


def test_the_text_encoder_of_the_newest_is_the_language_model_of_its_gemma_4():
    """Its parameters: embeddings 262144·3840; 40 layers with q, o 4096·3840 and k, v 2048·3840, and 8 with q, o
    8192·3840 and k 512·3840; in each three MLP matrices 15360·3840, two head norms, four norms and a scale."""
    alike = 3840 * (3 * 15360 + 4) + 1
    sliding, full = 3840 * (2 * 4096 + 2 * 2048) + 2 * 256, 3840 * (2 * 8192 + 512) + 2 * 512
    shapes = declared(Gemma(Scope(jnp.bfloat16), PRESETS["ltx2.5"].text_encoder))
    numbers = sum(map(math.prod, shapes.values()))
    assert (len(shapes), numbers) == (666, 262144 * 3840 + 3840 + 40 * sliding + 8 * full + 48 * alike)


# MD5 of "name", "name:shape" of all tensors, sorted, of the files that are published: from the table of models of
# DiffSynth-Studio 2.1.12, which recognises files so.
DIGESTS = {
    (
        "model.diffusion_model.",
    ): "7960c5dc4626650824e36f65a8e992e9",  # transformer, and the connectors without projections
    ("vae.",): "a1d642eecae96baa9c31d4e405564f49",  # conv; its names lack the prefix
    ("audio_vae.", "vocoder."): "c2488315f13356abb806f9f217f1e803",
}


@pytest.mark.parametrize("prefixes", DIGESTS, ids="".join)
def test_names_and_shapes_of_split_files_have_the_digests_that_are_published(prefixes: tuple[str, ...]):
    arch, lines = vars(PRESETS["ltx2.5"]), list[str]()
    for network, build in BUILDERS.items():
        shapes = declared(build(Scope(jnp.bfloat16), arch[network]))
        for ours, name in RENAMINGS[network].originals(shapes).items():
            if name.startswith(prefixes):
                name = name.removeprefix("vae.")
                lines += [name, f"{name}:{'_'.join(map(str, shapes[ours]))}"]
    assert md5(",".join(sorted(lines)).encode()).hexdigest() == DIGESTS[prefixes]


def test_every_published_model_is_described():
    for entry in CATALOG:
        if entry.kind == MODEL_KIND and entry.form != IN_PACKAGE:
            assert preset_checkpoint(entry.name).arch == PRESETS[entry.model_version.lower().replace("-", "")]
    assert preset_checkpoint("Lightricks/LTX-2@v1").arch.model_version == "ltx2"


def test_every_published_upsampler_is_described_with_its_size():
    """Sixteen bits a number, and a header."""
    sizes = {entry.name: entry.size for entry in CATALOG if entry.kind == "upscalers"}
    assert sizes.keys() == UPSAMPLERS.keys()
    for name, arch in UPSAMPLERS.items():
        assert not list(arch.conflicts())
        numbers = sum(map(math.prod, declared(LatentUpsampler(Scope(jnp.bfloat16), arch)).values()))
        assert 0 < sizes[name] - 2 * numbers < 50_000


@pytest.mark.parametrize("name", ["someone/model", "Lightricks/LTX-2/ltx-2-19b-distilled-lora-384.safetensors"])
def test_unknown_checkpoints_are_refused(name: str):
    with pytest.raises(UsageError, match=f"{name} is not on this machine") as error:
        preset_checkpoint(name)
    assert error.value.hint.endswith("lists: ltx2, ltx2.3, ltx2.5")
