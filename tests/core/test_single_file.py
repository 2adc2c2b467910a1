"""The same weights as a folder and as a single file, under the names and with the config of the published ones."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from embedded_configs import native_config
from ltx2_cli import load, read_spec, resolve
from ltx2_cli.core.report import Report
from ltx2_cli.errors import UsageError
from ltx2_cli.models.arch import Arch
from ltx2_cli.models.config import RENAMINGS
from ltx2_cli.models.open_checkpoint import open_file
from ltx2_cli.plan.resolve import Plan
from model_versions import LTX2, LTX2_3, other_text_encoder, random_folder
from program import run_program

Tensors = dict[str, np.ndarray]
OFF = {"guidance": 1, "stg": 0, "modality": 1}


class Twins(NamedTuple):
    """One model in both forms: its folder, and the tensors and metadata of its single file."""

    folder: Path
    tensors: Tensors
    config: Mapping[str, Any]
    version: str


def twins(arch: Arch, version: str, cache: Path) -> Twins:
    named = {}
    folder = random_folder(arch, cache)
    for network, renaming in RENAMINGS.items():
        declared = load_file(folder / network / "diffusion_pytorch_model.safetensors")
        named |= {theirs: declared[ours] for ours, theirs in renaming.originals(declared).items()}
    return Twins(folder, named, native_config(arch), version)


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return twins(LTX2_3, "2.3", tmp_path_factory.mktemp("newer"))


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return twins(LTX2, "2.0.0", tmp_path_factory.mktemp("older"))


def single_file(tmp_path: Path, model: Twins) -> Path:
    path = tmp_path / "ltx-2-tiny.safetensors"
    save_file(model.tensors, path, {"config": json.dumps(model.config), "model_version": model.version})
    return path


def plan_of(model: Path, **keys: object) -> Plan:
    size = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 2, "max_sequence_length": 32}
    exact = {"dtype": "float32", "text_encoder_dtype": "float32", "stg_blocks": [1], "seed": 3}
    return resolve(read_spec({"model": str(model), "prompt": "rain", "negative_prompt": "", **size, **exact, **keys}))


def loaded(plan: Plan, network: str) -> list[np.ndarray]:
    """The weights of a network as a run has them."""
    with load(plan).use(network, Report()) as module:
        return [np.asarray(array) for array in jax.tree.leaves(module)]


@pytest.mark.parametrize("name", ["newer", "older", "fewer_heads"])
def test_a_single_file_makes_the_same_bytes_as_the_folder(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model: Twins = request.getfixturevalue(name)
    single = plan_of(single_file(tmp_path, model), text_encoder=str(model.folder))
    whole = plan_of(model.folder)
    assert single.spec.model_name == "ltx-2-tiny"
    assert single.arch == whole.arch
    assert single.networks.present().keys() == whole.networks.present().keys()
    for network in whole.networks.present():
        for one, other in zip(loaded(single, network), loaded(whole, network), strict=True):
            np.testing.assert_array_equal(one, other, strict=True)


@pytest.fixture(scope="module")
def fewer_heads(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    """As wide as the older, which no tensor tells apart; with fewer layers of the denoiser and the connectors."""
    heads = {"num_attention_heads": 2, "attention_head_dim": 64}
    audio = {"audio_num_attention_heads": 2, "audio_attention_head_dim": 32}
    connectors = {"video_connector_num_layers": 1, "audio_connector_num_layers": 1}
    arch = replace(
        LTX2,
        transformer=replace(LTX2.transformer, num_layers=2, **heads, **audio),
        connectors=replace(LTX2.connectors, **connectors),
    )
    return twins(arch, "2.0.0", tmp_path_factory.mktemp("fewer-heads"))


@pytest.mark.parametrize("name", ["newer", "older", "fewer_heads"])
def test_a_single_file_of_any_size_makes_a_clip(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Twins = request.getfixturevalue(name)
    files = ["--model", str(single_file(tmp_path, model)), "--text-encoder", str(model.folder)]
    size = ["--height=64", "--width=64", "--num-frames=9", "--steps=1", "--set=max_sequence_length=32", "--no-audio"]
    scales = [f"--{kind}-scale={off}" for kind, off in OFF.items()]
    clip = tmp_path / "clip.mp4"
    assert run_program(monkeypatch, "generate", "rain", *files, *size, *scales, "-o", str(clip)) == 0
    assert clip.stat().st_size > 0


@pytest.mark.parametrize(
    ("section", "key", "value", "size", "tensor"),
    [
        ("transformer", "num_layers", 5, "num_layers 5", "not known: model.diffusion_model.transformer_blocks.5."),
        ("transformer", "attention_head_dim", 16, "attention_head_dim 16", "to_gate_logits.weight is 4x128, not 4x64"),
        ("transformer", "connector_num_layers", 3, "video_connector_num_layers 3", "missing: audio_connector."),
        ("vae", "latent_channels", 16, "latent_channels 16", "encoder.conv_in.conv.bias is 32, not 16"),
    ],
)
def test_metadata_that_contradict_the_tensors_are_refused(
    newer: Twins,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    section: str,
    key: str,
    value: int,
    size: str,
    tensor: str,
) -> None:
    config = {**newer.config, section: {**newer.config[section], key: value}}
    path = single_file(tmp_path, newer._replace(config=config))
    words = ["rain", "--model", str(path), "--text-encoder", str(newer.folder), "--dry-run"]
    assert run_program(monkeypatch, "generate", *words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{path} does not hold what its metadata describes" in said
    assert size in said
    assert tensor in said


@pytest.mark.parametrize("name", ["newer", "older"])
def test_info_is_equal_for_both_forms(
    name: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """But for the text encoder, which the folder alone has."""
    model: Twins = request.getfixturevalue(name)
    places = [str(model.folder), str(single_file(tmp_path, model))]
    assert run_program(monkeypatch, "info", "--json", *places) == 0
    folder, file = json.loads(capsys.readouterr().out)
    assert [each["model_version"] for each in (folder, file)] == [{"newer": "ltx2.3", "older": "ltx2"}[name]] * 2
    text, *others = folder["networks"]
    assert text["name"] == "text_encoder"
    assert sorted(others, key=str) == sorted(file["networks"], key=str)
    assert folder["parameters"] == file["parameters"] + text["parameters"]
    assert folder["bytes"] > 4 * folder["parameters"]  # float32 and headers


def in_eight_bits(
    tensors: Mapping[str, np.ndarray], scaled: bool
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What an fp8 file holds, the matrices of the denoiser's layers in eight bits, and what that means."""
    stored, meant = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if not re.fullmatch(r"model\.diffusion_model\.transformer_blocks\..*\.weight", name) or tensor.ndim != 2:
            continue
        scale = np.float32(np.abs(tensor).max() / 448) if scaled else np.float32(1)
        stored[name] = (tensor / scale).astype(ml_dtypes.float8_e4m3fn)
        meant[name] = stored[name].astype(np.float32) * scale
        if scaled:
            layer = name.removesuffix(".weight")
            stored |= {f"{layer}.weight_scale": np.array(scale), f"{layer}.input_scale": np.array(7, np.float32)}
    return stored, meant


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "unscaled"])
def test_an_eight_bit_file_makes_the_bytes_of_its_scaled_weights(newer: Twins, tmp_path: Path, scaled: bool) -> None:
    stored, meant = in_eight_bits(newer.tensors, scaled)
    networks = []
    for name, tensors in (("stored", stored), ("meant", meant)):
        (tmp_path / name).mkdir()
        path = single_file(tmp_path / name, newer._replace(tensors=tensors))
        networks.append(loaded(plan_of(path, text_encoder=str(newer.folder)), "transformer"))
    eight_bits = sum(array.dtype == ml_dtypes.float8_e4m3fn for array in stored.values())
    assert eight_bits == 6 * 34  # linear layers with their gates, in six layers
    for one, other in zip(*networks, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)
    exact = loaded(plan_of(newer.folder), "transformer")
    far = [
        np.linalg.norm(one - other) > 1e-3 * np.linalg.norm(other)
        for one, other in zip(networks[0], exact, strict=True)
    ]
    assert any(far)  # eight bits are not many


def test_unknown_and_missing_tensors_are_named(newer: Twins, tmp_path: Path) -> None:
    changed = {**newer.tensors, "model.diffusion_model.novelty": np.zeros(1, np.float32)}
    del changed["vocoder.vocoder.conv_pre.bias"]
    path = single_file(tmp_path, newer._replace(tensors=changed))
    with pytest.raises(
        UsageError, match=r"transformer: 1 not known: model.diffusion_model.novelty.*missing: vocoder.conv_in.bias"
    ):
        plan_of(path, text_encoder=str(newer.folder))


@pytest.mark.parametrize("version", ["2.0.0", "2-0", "2", "2.2.9", "2.5.0", "2.10", "3"])
def test_a_version_that_contradicts_the_transformer_is_refused(newer: Twins, tmp_path: Path, version: str) -> None:
    path = single_file(tmp_path, newer._replace(version=version))
    with pytest.raises(UsageError, match=f"model_version is '{version}', the transformer in it is of ltx2.3") as caught:
        open_file(path, newer.folder)
    assert "as the model" in caught.value.hint


@pytest.mark.parametrize("version", ["2.3", "2-3", "2.3.1", "", "dev"])
def test_an_unknown_version_is_accepted(newer: Twins, tmp_path: Path, version: str) -> None:
    path = single_file(tmp_path, newer._replace(version=version))
    assert open_file(path, newer.folder).arch == LTX2_3


def test_the_older_models_version(older: Twins, tmp_path: Path) -> None:
    path = single_file(tmp_path, older._replace(version="2.3"))
    with pytest.raises(UsageError, match=r"model_version is '2.3', the transformer in it is of ltx2$"):
        open_file(path, older.folder)


def test_networks_of_two_versions_in_one_file_are_refused(newer: Twins, older: Twins, tmp_path: Path) -> None:
    mixed = {name: tensor for name, tensor in newer.tensors.items() if not name.startswith("vae.")}
    mixed |= {name: tensor for name, tensor in older.tensors.items() if name.startswith("vae.")}
    config = {**newer.config, "vae": older.config["vae"]}
    path = single_file(tmp_path, newer._replace(tensors=mixed, config=config))
    finding = r"this ltx2.3 model .* vae.decoder_blocks.1.0 is 'compress_all', .* the decoder's lists differ in length"
    with pytest.raises(UsageError, match=finding):
        open_file(path, newer.folder)


def test_all_faults_are_one_message(newer: Twins, tmp_path: Path) -> None:
    text = tmp_path / "text"
    other_text_encoder(text, hidden_size=96, num_hidden_layers=2)
    tensors = {**newer.tensors, "vocoder.novelty": np.zeros(1, np.float32)}
    del tensors["model.diffusion_model.proj_out.bias"]
    path = single_file(tmp_path, newer._replace(tensors=tensors, version="2.0"))
    with pytest.raises(UsageError) as caught:
        plan_of(path, text_encoder=str(text))
    for finding in (
        "tokenizer.json is missing",
        "model_version is '2.0'",
        "the text encoder's width and the connectors' caption_channels differ: 96 and 64",
        "the text encoder's states and the connectors' text_proj_in_factor differ: 3 and 4",
        "transformer: 1 missing: proj_out.bias",
        "transformer: 1 not known: vocoder.novelty",
    ):
        assert finding in str(caught.value)
    assert "as the text encoder" in caught.value.hint
    assert "as the model" in caught.value.hint
    assert "\n" not in str(caught.value)


def test_every_faulty_section_is_named(newer: Twins, tmp_path: Path) -> None:
    """What depends on none of them is still judged."""
    wrong = {
        "transformer": {**newer.config["transformer"], "rope_type": "interleaved"},
        "vae": {**newer.config["vae"], "norm_layer": "group_norm"},
        "vocoder": None,
    }
    tensors = dict(newer.tensors)
    del tensors["audio_vae.decoder.conv_in.conv.bias"]
    path = single_file(tmp_path, newer._replace(tensors=tensors, config={**newer.config, **wrong}))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UsageError) as caught:
        plan_of(path, text_encoder=str(tmp_path / "nothing"))
    for finding in (
        "this ltx2.3 model is not implemented: transformer.rope_type is 'interleaved', only 'split' is",
        "vae.norm_layer is 'group_norm', only 'pixel_norm' is",
        "the config has no section vocoder",
        "audio_vae: 1 missing: decoder.conv_in.conv.bias",
        "nothing/config.json is missing",
    ):
        assert finding in str(caught.value)
    assert "as the text encoder" in caught.value.hint


def test_a_file_without_a_config_is_refused(newer: Twins, tmp_path: Path) -> None:
    save_file(newer.tensors, tmp_path / "bare.safetensors")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UsageError, match=r"has no config in its metadata.*nothing holds no weights"):
        plan_of(tmp_path / "bare.safetensors", text_encoder=str(tmp_path / "nothing"))


def test_a_truncated_file_is_refused(newer: Twins, tmp_path: Path) -> None:
    (tmp_path / "cut.safetensors").write_bytes(single_file(tmp_path, newer).read_bytes()[:-1])
    with pytest.raises(UsageError, match=r"cut.safetensors is damaged or cut short") as caught:
        plan_of(tmp_path / "cut.safetensors", text_encoder=str(newer.folder))
    assert "download it again" in caught.value.hint


def test_a_missing_text_encoder_is_refused(newer: Twins, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gemma-3-12b.* is not in the local cache"):
        plan_of(single_file(tmp_path, newer))
    with pytest.raises(UsageError, match="has a text encoder of its own"):
        plan_of(newer.folder, text_encoder=str(newer.folder))


def test_latents_decode_without_a_text_encoder(newer: Twins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = plan_of(newer.folder).latent_shapes._asdict()
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "l.safetensors")
    arguments = ["decode", str(tmp_path / "l.safetensors"), "--model", str(single_file(tmp_path, newer))]
    assert run_program(monkeypatch, *arguments, "-o", str(tmp_path / "a.wav")) == 0
    assert (tmp_path / "a.wav").stat().st_size > 10_000
