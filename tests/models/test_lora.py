"""LoRAs against the networks of both model versions at real size: every naming, every count, every error."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_ltx2_lora_to_diffusers
from safetensors.numpy import load_file

from loras import distilled, factors, keys, linears, original, write, write_header
from ltx2_cli.errors import UsageError
from ltx2_cli.models.arch import ConnectorsArch, TransformerArch
from ltx2_cli.models.connectors import TextConnectors
from ltx2_cli.models.lora import find_adapters, makes_hdr, reference_scale
from ltx2_cli.models.networks import Networks, abstract_networks
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.request.spec import DType
from ltx2_cli.weights.declare import Scope, Shape
from ltx2_cli.weights.lora import LoraDelta, LoraFile, model_version, open_lora
from tools.train_demo.arch import ARCH

NEW = {
    "gated_attn": True,
    "audio_gated_attn": True,
    "cross_attn_mod": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
}
NEW_CONNECTORS = {
    "video_connector_num_attention_heads": 32,
    "video_connector_num_layers": 8,
    "video_gated_attn": True,
    "audio_connector_num_attention_heads": 32,
    "audio_connector_attention_head_dim": 64,
    "audio_connector_num_layers": 8,
    "audio_gated_attn": True,
    "per_modality_projections": True,
    "proj_bias": True,
}
SIZES = {"ltx2": ({}, {}), "ltx2.3": (NEW, NEW_CONNECTORS)}
ATTENTION = "transformer_blocks.0.attn1.to_q"
PREFIXES = ("diffusion_model.", "model.diffusion_model.", "", "base_model.model.diffusion_model.", "base_model.model.")


@pytest.fixture(scope="module")
def models() -> dict[str, Networks]:
    """Both model versions without weights."""
    tiny = abstract_networks(ARCH, DType.bfloat16, DType.float32)
    scope = Scope("bfloat16")
    return {
        name: tiny._replace(
            transformer=Transformer(scope, TransformerArch(**denoiser)),
            connectors=TextConnectors(scope, ConnectorsArch(**connectors)),
        )
        for name, (denoiser, connectors) in SIZES.items()
    }


def opened(path: Path, shapes: Mapping[str, Shape], metadata: Mapping[str, str] | None = None) -> LoraFile:
    return open_lora(write_header(path / f"{len(list(path.iterdir()))}.safetensors", shapes, metadata))


def found(networks: Networks, *loras: LoraFile) -> dict[str, dict[str, LoraDelta]]:
    return find_adapters([(lora, 1.0) for lora in loras], networks)


def refusal(networks: Networks, *loras: LoraFile) -> UsageError:
    with pytest.raises(UsageError) as caught:
        found(networks, *loras)
    return caught.value


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("model", SIZES)
def test_the_published_distilled_lora_matches_completely(
    models: dict[str, Networks], tmp_path: Path, model: str, prefix: str
) -> None:
    """All 1660 (LTX-2: 1370) linear layers, each of the largest rank up to 384 that it can have."""
    shapes = linears(f"{model}/transformer.tsv")
    assert len(shapes) == {"ltx2": 1370, "ltx2.3": 1660}[model]
    adapters = found(models[model], opened(tmp_path, distilled(model, prefix)))
    ranks = {name: low_rank.rank for name, low_rank in adapters["transformer"].items()}
    assert ranks == {f"{name}.weight": min(384, *shape) for name, shape in shapes.items()}
    assert adapters["connectors"] == {}


def test_the_published_size_equals_that_of_the_keys(tmp_path: Path) -> None:
    """So the targets and ranks above are those of the file that is published."""
    path = write_header(tmp_path / "x.safetensors", distilled("ltx2.3"))
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    assert path.stat().st_size - 8 - header == 7_604_994_048


@pytest.mark.parametrize("prefix", ["transformer.", "", "base_model.model.", "base_model.model.transformer."])
@pytest.mark.parametrize("model", SIZES)
def test_diffusers_names_match(models: dict[str, Networks], tmp_path: Path, model: str, prefix: str) -> None:
    shapes = linears(f"{model}/transformer.tsv")
    lora = opened(tmp_path, keys({f"{prefix}{name}": shape for name, shape in shapes.items()}, 4))
    assert found(models[model], lora)["transformer"].keys() == {f"{name}.weight" for name in shapes}


@pytest.mark.parametrize("model", SIZES)
def test_original_names_have_the_targets_of_diffusers(models: dict[str, Networks], tmp_path: Path, model: str) -> None:
    """And the file that diffusers would write goes to the same tensors."""
    published = distilled(model)
    converted = _convert_non_diffusers_ltx2_lora_to_diffusers(dict(published))
    theirs = opened(tmp_path, converted)
    assert len(theirs.pairs) == len(published) / 2
    for network, tensors in found(models[model], theirs, opened(tmp_path, published)).items():
        for name, low_rank in tensors.items():
            diffusers, ours = (lora.pairs[target] for lora, target, _ in low_rank.parts)
            assert diffusers.a == f"{network}.{name.removesuffix('weight')}lora_A.weight"
            assert ours.shape == diffusers.shape


@pytest.mark.parametrize("naming", ["original", "with model", "diffusers", "peft"])
@pytest.mark.parametrize("model", SIZES)
def test_connectors_are_targets_too(models: dict[str, Networks], tmp_path: Path, model: str, naming: str) -> None:
    shapes = linears(f"{model}/connectors.tsv")
    single = original("connectors", shapes)
    names = {
        "original": {name: single[name].removeprefix("model.") for name in shapes},
        "with model": single,
        "diffusers": {name: f"connectors.{name}" for name in shapes},
        "peft": {name: f"base_model.model.{name}" for name in shapes},
    }[naming]
    lora = opened(tmp_path, keys({names[name]: shape for name, shape in shapes.items()}, 4))
    assert found(models[model], lora)["connectors"].keys() == {f"{name}.weight" for name in shapes}


def test_the_text_projection_has_its_published_name(models: dict[str, Networks], tmp_path: Path) -> None:
    old = keys({"text_embedding_projection.aggregate_embed": (3840, 188160)}, 8)
    assert found(models["ltx2"], opened(tmp_path, old))["connectors"].keys() == {"text_proj_in.weight"}
    new = keys({"text_embedding_projection.audio_aggregate_embed": (2048, 188160)}, 8)
    assert found(models["ltx2.3"], opened(tmp_path, new))["connectors"].keys() == {"audio_text_proj_in.weight"}


def test_any_subset_of_layers_and_ranks_matches(models: dict[str, Networks], tmp_path: Path) -> None:
    layers = {f"diffusion_model.transformer_blocks.{layer}.attn1.to_q": layer + 1 for layer in (0, 7, 47)}
    pairs = [keys({name: (4096, 4096)}, rank) for name, rank in layers.items()]
    adapters = found(models["ltx2"], opened(tmp_path, {key: shape for pair in pairs for key, shape in pair.items()}))
    assert {name: each.rank for name, each in adapters["transformer"].items()} == {
        f"transformer_blocks.{layer}.attn1.to_q.weight": layer + 1 for layer in (0, 7, 47)
    }


def test_several_files_add_up_with_their_strengths(models: dict[str, Networks], tmp_path: Path) -> None:
    out, into = 32, 4096  # a gate
    gate = "transformer_blocks.3.attn1.to_gate_logits"
    files = [
        open_lora(write(tmp_path / f"{number}.safetensors", factors(f"{prefix}{gate}", out, into, number + 1, number)))
        for number, prefix in enumerate(("diffusion_model.", "transformer."))
    ]
    elsewhere = opened(tmp_path, keys({"transformer.proj_in": (4096, 128)}, 2))
    loras = [(files[0], 0.5), (files[1], -2.0), (elsewhere, 1.0)]
    adapters = find_adapters(loras, models["ltx2.3"])["transformer"]
    assert {name: each.rank for name, each in adapters.items()} == {f"{gate}.weight": 3, "proj_in.weight": 2}
    a, b, scales = map(np.float64, adapters[f"{gate}.weight"].read())
    (a0, b0), (a1, b1) = ([tensor.astype(np.float64) for tensor in load_file(file.path).values()] for file in files)
    wanted = 0.5 * b0 @ a0 - 2 * b1 @ a1
    np.testing.assert_allclose(b * scales @ a, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("lora", "model", "count", "missing"),
    [
        ("ltx2.3", "ltx2", "1364 of 1660", "294 not in it: diffusion_model.prompt_adaln_single.emb.timestep_emb"),
        ("ltx2", "ltx2.3", "1364 of 1370", "4 not in it: diffusion_model.caption_projection.linear_1, "),
    ],
)
def test_a_lora_of_the_other_model_version_is_refused_with_counts(
    models: dict[str, Networks], tmp_path: Path, lora: str, model: str, count: str, missing: str
) -> None:
    names = {"ltx2": "LTX-2", "ltx2.3": "LTX-2.3"}
    error = refusal(models[model], opened(tmp_path, distilled(lora)))
    said = f"{count} targets (each a pair of keys, A and B) match this {names[model]} model"
    assert f"{said}; it was made for {names[lora]}. " in str(error)
    assert missing in str(error)
    rows = {"ltx2": "24576x4096", "ltx2.3": "36864x4096"}
    reshaped = f"diffusion_model.adaln_single.linear is {rows[lora]}, not {rows[model]}"
    assert f"2 of another shape: {reshaped}" in str(error)
    assert error.hint == f"--model {lora}, or leave out {tmp_path / '0.safetensors'}"


def test_metadata_of_the_other_model_version_is_refused(models: dict[str, Networks], tmp_path: Path) -> None:
    shapes = keys({"diffusion_model.transformer_blocks.3.attn1.to_q": (4096, 4096)}, 4)
    assert len(found(models["ltx2"], opened(tmp_path, shapes))["transformer"]) == 1
    error = refusal(models["ltx2"], opened(tmp_path, shapes, {"model_version": "2.3"}))
    assert "1 of 1 targets (each a pair of keys, A and B) match this LTX-2 model; it was made for LTX-2.3" in str(error)
    assert error.hint.startswith("--model ltx2.3")


def test_in_context_loras_say_how_large_references_are(tmp_path: Path) -> None:
    shapes = keys({"diffusion_model.transformer_blocks.3.attn1.to_q": (4096, 4096)}, 4)
    names = "reference_downscale_factor", "reference_temporal_scale_factor"
    assert reference_scale(opened(tmp_path, shapes)) is None
    assert reference_scale(opened(tmp_path, shapes, {names[0]: "2"})) == (2, 1)
    assert reference_scale(opened(tmp_path, shapes, dict(zip(names, "23", strict=True)))) == (2, 3)
    unsaid = open_lora(write_header(tmp_path / "LTX-2-IC-LoRA-pose.safetensors", shapes))
    assert reference_scale(unsaid) == (1, 1)
    assert not makes_hdr(unsaid)
    assert makes_hdr(open_lora(write_header(tmp_path / "ltx-2.3-22b-ic-lora-hdr-0.9.safetensors", shapes)))
    with pytest.raises(UsageError, match=r"its reference_downscale_factor is '0\.5', no whole number"):
        reference_scale(opened(tmp_path, shapes, {names[0]: "0.5"}))


def test_five_unknown_keys_are_named_and_the_others_counted(models: dict[str, Networks], tmp_path: Path) -> None:
    unknown = {f"diffusion_model.transformer_blocks.{layer}.attn3.to_q": (4096, 4096) for layer in range(9)}
    error = refusal(models["ltx2"], opened(tmp_path, keys({ATTENTION: (4096, 4096), **unknown}, 4)))
    named = ", ".join(list(unknown)[:5])
    assert (
        f"1 of 10 targets (each a pair of keys, A and B) match this LTX-2 model. 9 not in it: {named} and 4 more"
        in (str(error))
    )
    assert error.hint == f"leave out {tmp_path / '0.safetensors'}"


def test_only_linear_layers_are_targets(models: dict[str, Networks], tmp_path: Path) -> None:
    names = ("connectors.video_connector.learnable_registers", "transformer.scale_shift_table", "vae.decoder.conv_in")
    error = refusal(models["ltx2"], opened(tmp_path, keys(dict.fromkeys(names, (128, 3840)), 4)))
    assert f"3 not in it: {', '.join(names)}" in str(error)


def test_one_tensor_under_two_names_is_refused(models: dict[str, Networks], tmp_path: Path) -> None:
    twice = keys({f"transformer.{ATTENTION}": (4096, 4096), f"diffusion_model.{ATTENTION}": (4096, 4096)}, 4)
    error = refusal(models["ltx2"], opened(tmp_path, twice))
    assert f"1 there twice: diffusion_model.{ATTENTION}, also called transformer.{ATTENTION}" in str(error)


def test_faults_of_all_files_are_one_message(models: dict[str, Networks], tmp_path: Path) -> None:
    good = opened(tmp_path, keys({ATTENTION: (4096, 4096)}, 4))
    odd = opened(tmp_path, keys({"unknown": (4096, 4096)}, 4))
    small = opened(tmp_path, keys({ATTENTION: (6, 4096)}, 4))
    error = refusal(models["ltx2"], good, odd, small)
    assert f"{good.path}" not in str(error)
    assert f"{odd.path}: 0 of 1 targets" in str(error)
    assert f"{small.path}: 0 of 1 targets" in str(error)
    assert f"1 of another shape: {ATTENTION} is 6x4096, not 4096x4096" in str(error)
    assert error.hint == f"leave out {odd.path}; leave out {small.path}"


@pytest.mark.parametrize(
    ("shapes", "metadata", "wanted"),
    [
        ({f"diffusion_model.{ATTENTION}": (4096, 4096)}, {}, None),
        ({"diffusion_model.transformer_blocks.0.attn1.to_gate_logits": (32, 4096)}, {}, "ltx2.3"),
        ({"diffusion_model.prompt_adaln_single.linear": (8192, 4096)}, {}, "ltx2.3"),
        ({"transformer.audio_prompt_adaln.emb.timestep_embedder.linear_1": (2048, 256)}, {}, "ltx2.3"),
        ({"text_embedding_projection.video_aggregate_embed": (4096, 188160)}, {}, "ltx2.3"),
        ({"connectors.audio_text_proj_in": (2048, 188160)}, {}, "ltx2.3"),
        ({"text_embedding_projection.aggregate_embed": (3840, 188160)}, {}, "ltx2"),
        ({"diffusion_model.audio_caption_projection.linear_2": (2048, 2048)}, {}, "ltx2"),
        ({"diffusion_model.adaln_single.linear": (24576, 4096)}, {}, "ltx2"),
        ({"diffusion_model.adaln_single.linear": (36864, 4096)}, {}, "ltx2.3"),
        ({"transformer.audio_time_embed.linear": (18432, 2048)}, {}, "ltx2.3"),
        ({"diffusion_model.av_ca_a2v_gate_adaln_single.linear": (4096, 4096)}, {}, None),
        ({ATTENTION: (4096, 4096)}, {"model_version": "2.3.0"}, "ltx2.3"),
        ({ATTENTION: (4096, 4096)}, {"ss_base_model_version": "ltx2.3"}, "ltx2.3"),
        ({ATTENTION: (4096, 4096)}, {"modelspec.architecture": "LTX-2.0/lora"}, "ltx2"),
        ({ATTENTION: (4096, 4096)}, {"ss_base_model_version": "ltx2"}, None),  # said of both
        ({ATTENTION: (4096, 4096)}, {"model_version": "2.0", "ss_base_model_version": "ltx2.3"}, None),
        ({"diffusion_model.adaln_single.linear": (24576, 4096)}, {"model_version": "2.3.0"}, "ltx2"),
    ],
)
def test_keys_and_metadata_tell_the_model_version(
    tmp_path: Path, shapes: dict[str, tuple[int, int]], metadata: dict[str, str], wanted: str | None
) -> None:
    assert model_version(opened(tmp_path, keys(shapes, 4), metadata)) == wanted


@pytest.mark.parametrize("model", SIZES)
def test_the_published_distilled_lora_has_its_model_version(tmp_path: Path, model: str) -> None:
    assert model_version(opened(tmp_path, distilled(model))) == model
