"""The config in the metadata of the published single files: what it may state, and what is refused by name."""

import json
import re
from collections.abc import Iterator
from functools import reduce
from importlib.resources import files
from typing import Any

import pytest

from embedded_configs import NATIVE
from ltx2_cli.models.config import Config, config_problems, stated_sizes
from ltx2_cli.models.networks import CONFIGS, PRESETS, READERS

DDCONFIG = "audio_vae.model.params.ddconfig"


def problems(config: Config, version: str = "ltx2.3") -> str:
    found = list(config_problems(config, version, "model.safetensors"))
    assert all("as the model" in problem.hint for problem in found)
    return ". ".join(map(str, found))


def changed(path: str, value: Any, version: str = "ltx2.3") -> Config:
    """The published config with another value at a path; numbers count in lists."""
    config = json.loads(json.dumps(NATIVE[version]))  # blocks that are one object become several
    *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    reduce(lambda inner, step: inner[step], way, config)[last] = value
    return config


def flat(config: Config, path: str = "") -> Iterator[tuple[str, Any]]:
    """Values by the path that `changed` takes."""
    for key, value in config.items():
        nested = isinstance(value, list) and any(isinstance(entry, list | dict) for entry in value)
        inner = {str(number): entry for number, entry in enumerate(value)} if nested else value
        yield from flat(inner, f"{path}{key}.") if isinstance(inner, dict) else [(f"{path}{key}", value)]


@pytest.mark.parametrize("version", NATIVE)
def test_published_configs_are_read_as_published(version: str) -> None:
    assert problems(NATIVE[version], version) == ""


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("transformer.dropout", 0.5),
        ("transformer.new_and_off", False),
        ("transformer.rope_type", None),
        ("transformer.text_encoder_norm_type", "PER_TOKEN_RMS"),
        ("scheduler", {"sampler": "another"}),
        (f"{DDCONFIG}.resolution", 512),
        ("vae.decoder_blocks.0.1.inject_noise", False),
        ("vocoder.bwe.new_and_empty", []),
    ],
)
def test_irrelevant_values_are_ignored(path: str, value: Any) -> None:
    assert problems(changed(path, value)) == ""


@pytest.mark.parametrize("version", NATIVE)
def test_values_without_a_shape_must_equal_the_published_ones(version: str) -> None:
    values = json.loads(files("ltx2_cli.models").joinpath(f"native.{version}.json").read_text())
    keys = {key.split(".")[-1] for key, _ in flat(values)}
    assert {"norm_eps", "rope_type", "causal_decoder", "hop_length", "resblock", "stereo"} <= keys
    for key, value in flat(values):
        assert problems(changed(key, "another", version), version).endswith(f" {key} is 'another', only {value!r} is")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("transformer.new_and_on", True),
        ("transformer.share_ff", True),
        ("transformer.positional_embedding_max_pos", [20, 2048]),
        ("vae.timestep_conditioning", True),
        (f"{DDCONFIG}.attn_resolutions", [64]),
        (f"{DDCONFIG}.mid_block_add_attention", True),
        ("vocoder.vocoder.apply_final_activation", False),
        ("vae.decoder_blocks.0.1.inject_noise", True),
        ("vae.encoder_blocks", 4),
    ],
)
def test_unsupported_values_are_refused_by_name(path: str, value: Any) -> None:
    found = problems(changed(path, value))
    assert found.startswith("model.safetensors: this ltx2.3 model is not implemented: ")
    key = re.match(r"[a-z_.]+[a-z]", path)  # up to an index into a list
    assert key is not None
    assert key[0] in found


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("transformer.text_encoder_norm_type", "per_token_rms"),
        ("vae.spatial_padding_mode", "zeros"),
        ("vocoder.output_sample_rate", 48000),
        ("vocoder.activation", "snakebeta"),
    ],
)
def test_a_value_of_the_newer_model_is_refused_in_the_older(path: str, value: Any) -> None:
    assert f"{path} is {value!r}" in problems(changed(path, value, "ltx2"), "ltx2")


def test_an_endless_value_is_refused_in_one_sentence() -> None:
    deep: dict[str, Any] = {}
    for _ in range(900):
        deep = {"deeper": deep}
    nested = json.loads("[" * 900 + "]" * 900)
    found = problems(NATIVE["ltx2.3"] | {"vae": {"new": deep, "dims": nested}})
    assert found.count("which is not known") == 2
    assert len(found) < 500


def test_all_faults_are_one_message() -> None:
    config = changed("transformer.norm_eps", 1e-5) | {"vae": None}
    config["vocoder"]["bwe"]["n_fft"] = 128
    assert problems(config) == (
        "model.safetensors: the config has no section vae. model.safetensors: this ltx2.3 model is not implemented:"
        " transformer.norm_eps is 1e-05, only 1e-06 is; vocoder.bwe.n_fft is 128, only 512 is"
    )


@pytest.mark.parametrize("version", NATIVE)
def test_published_sizes_are_those_of_the_published_folders(version: str) -> None:
    for network, sizes in stated_sizes(NATIVE[version]).items():
        assert sizes
        assert (
            READERS[network](CONFIGS[version][network] | sizes, "model.safetensors") == vars(PRESETS[version])[network]
        )
