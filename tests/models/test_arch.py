"""Configs of networks: what is refused, in which words, and what a config means that leaves something out."""

from dataclasses import asdict

import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler

from ltx2_cli.errors import UsageError
from ltx2_cli.models.arch import ConnectorsArch, SchedulerArch, TransformerArch
from ltx2_cli.models.audio_vae import AudioVAEArch
from ltx2_cli.models.config import Config, NetworkArch, read_arch
from ltx2_cli.models.video_vae import VideoVAEArch
from ltx2_cli.models.vocoder import VocoderArch, VocoderWithBWEArch

KINDS = (
    TransformerArch,
    ConnectorsArch,
    VideoVAEArch,
    AudioVAEArch,
    VocoderArch,
    VocoderWithBWEArch,
    SchedulerArch,
)
WHOLE = "only a whole number above 0 is"
SPLIT = {"rope_type": "split"}  # leaving it out means another

REFUSED = [
    (TransformerArch, {"num_layers": "3"}, f"num_layers is '3', {WHOLE}"),
    (TransformerArch, {"num_layers": 2.5}, f"num_layers is 2.5, {WHOLE}"),
    (TransformerArch, {"num_layers": True}, f"num_layers is True, {WHOLE}"),
    (TransformerArch, {"num_layers": 0}, f"num_layers is 0, {WHOLE}"),
    (TransformerArch, {"num_layers": -1}, f"num_layers is -1, {WHOLE}"),
    (TransformerArch, {"num_layers": 10**9}, "num_layers is 1000000000, at most 1000 are"),
    (VideoVAEArch, {"layers_per_block": [4, 6, 10**9, 2, 2]}, "1000000000, 2, 2), at most 1000 are"),
    (TransformerArch, {"num_attention_heads": [4]}, f"num_attention_heads is [4], {WHOLE}"),
    (TransformerArch, {"vae_scale_factors": 8}, "vae_scale_factors is 8, only [a whole number above 0, a"),
    (TransformerArch, {"vae_scale_factors": [8, 32]}, "vae_scale_factors is [8, 32], only [a whole"),
    (TransformerArch, {"vae_scale_factors": [8, 32, 32, 1]}, "vae_scale_factors is [8, 32, 32, 1], only"),
    (TransformerArch, {"audio_sampling_rate": 0}, f"audio_sampling_rate is 0, {WHOLE}"),
    (TransformerArch, {"pos_embed_max_pos": 0}, f"pos_embed_max_pos is 0, {WHOLE}"),
    (TransformerArch, {"timestep_scale_multiplier": 0}, "multiplier is 0, only a number above 0 is"),
    (TransformerArch, {"rope_theta": float("nan")}, "rope_theta is nan, only a number above 0 is"),
    (TransformerArch, {"norm_eps": float("inf")}, "norm_eps is inf, only a number above 0 is"),
    (TransformerArch, {"gated_attn": "yes"}, "gated_attn is 'yes', only true or false is"),
    (TransformerArch, {"gated_attn": 1}, "gated_attn is 1, only true or false is"),
    (TransformerArch, {"attention_head_dim": 33}, "; attention_head_dim is odd"),
    (TransformerArch, {"audio_attention_head_dim": 7}, "audio_attention_head_dim is odd"),
    (TransformerArch, {"cross_attention_dim": 64}, "; cross_attention_dim is 64, text is projected to 4096"),
    (ConnectorsArch, {"video_connector_num_layers": 0}, f"video_connector_num_layers is 0, {WHOLE}"),
    (ConnectorsArch, {"audio_connector_attention_head_dim": 5}, "audio_connector_attention_head_dim is odd"),
    (VideoVAEArch, {"upsample_factor": [0, 2, 2]}, "upsample_factor is [0, 2, 2], only [a whole number above 0, …] is"),
    (VideoVAEArch, {"upsample_factor": []}, "upsample_factor is [], only [a whole number above 0, …] is"),
    (VideoVAEArch, {"upsample_type": ["spatial", 1]}, "upsample_type is ['spatial', 1], only [a string, …] is"),
    (AudioVAEArch, {"ch_mult": []}, "ch_mult is [], only [a whole number above 0, …] is"),
    (AudioVAEArch, {"num_res_blocks": "a"}, f"num_res_blocks is 'a', {WHOLE}"),
    (VocoderArch, {"resnet_dilations": [1, 3, 5]}, "[1, 3, 5], only [[a whole number above 0, …], …] is"),
    (VocoderArch, {"resnet_dilations": [[1, 3, 5]]}, "resnet_kernel_sizes and resnet_dilations differ in length"),
    (VocoderArch, {"upsample_factors": [6, 5]}, "upsample_kernel_sizes and upsample_factors differ in length"),
    (VocoderArch, {"hidden_channels": 31}, "hidden_channels cannot be halved 5 times"),
    (VocoderArch, {"output_sampling_rate": 0}, f"output_sampling_rate is 0, {WHOLE}"),
    (VocoderArch, {"final_act_fn": 3}, "final_act_fn is 3, only a string or null is"),
    (VocoderWithBWEArch, {"input_sampling_rate": 0}, f"input_sampling_rate is 0, {WHOLE}"),
    (VocoderWithBWEArch, {"bwe_resnet_dilations": [[1]]}, "of the second generator, resnet_kernel_sizes and"),
    (SchedulerArch, {"max_image_seq_len": 256}, "base_image_seq_len and max_image_seq_len are equal"),
    (SchedulerArch, {"shift_terminal": "a"}, "shift_terminal is 'a', only a number or null is"),
    (SchedulerArch, {"shift_terminal": 1.0}, "shift_terminal is 1.0, only from 0 to below 1 is"),
    (SchedulerArch, {"shift_terminal": -0.1}, "shift_terminal is -0.1, only from 0 to below 1 is"),
    (SchedulerArch, {"shift": 0}, "shift is 0, only a number above 0 is"),
]


@pytest.mark.parametrize(("kind", "config", "finding"), REFUSED, ids=lambda value: str(value)[:50])
def test_impossible_values_are_refused_by_name(kind: type[NetworkArch], config: Config, finding: str) -> None:
    needed = SPLIT if kind in (TransformerArch, ConnectorsArch) else {}
    with pytest.raises(UsageError) as caught:
        read_arch(kind, {**needed, **config}, "here/config.json")
    assert finding in str(caught.value).replace("here/config.json: this model is not implemented: ", "; ")
    assert caught.value.hint


def test_all_faults_are_one_message() -> None:
    wrong = {"num_layers": "3", "gated_attn": 1, "activation_fn": "relu", "novelty": [4]}
    with pytest.raises(UsageError) as caught:
        read_arch(TransformerArch, wrong, "here")
    for part in ("num_layers is '3'", "gated_attn is 1", "activation_fn is 'relu'", "novelty", "rope_type is 'inter"):
        assert part in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_with_all_defaults_gives_the_default_network(kind: type[NetworkArch]) -> None:
    def listed(value: object) -> object:
        return [listed(each) for each in value] if isinstance(value, tuple) else value

    written = {name: listed(value) for name, value in asdict(kind()).items()} | kind.only
    assert read_arch(kind, written, "here") == kind()


@pytest.mark.parametrize("kind", KINDS)
def test_null_equals_a_missing_key(kind: type[NetworkArch]) -> None:
    null = dict.fromkeys({*asdict(kind()), *kind.only, "novelty"} - {"final_act_fn"})
    if not kind.omitted:
        assert read_arch(kind, null, "here") == read_arch(kind, {}, "here") == kind()
    for config in (null, {}) if kind.omitted else ():
        with pytest.raises(UsageError, match=r"rope_type is 'interleaved', only 'split' is$"):
            read_arch(kind, config, "here")


def test_null_is_a_valid_value_of_few_keys() -> None:
    assert VocoderArch().final_act_fn == "tanh"
    assert read_arch(VocoderArch, {"final_act_fn": None}, "here").final_act_fn is None


def test_some_numbers_may_be_integers_zero_or_negative() -> None:
    assert read_arch(TransformerArch, {**SPLIT, "rope_theta": 500}, "here").rope_theta == 500
    assert read_arch(SchedulerArch, {"base_shift": -1, "max_shift": 0}, "here").shift_factor(4096) == 1


def test_a_terminal_shift_of_zero_means_none() -> None:
    config = {"shift": 3.0, "shift_terminal": 0}
    reference = FlowMatchEulerDiscreteScheduler(**config)
    reference.set_timesteps(sigmas=np.linspace(1, 1 / 8, 8))
    ours = read_arch(SchedulerArch, config, "here").sigmas(8, 4096)
    assert ours[-2] > 0.2
    np.testing.assert_allclose(ours, reference.sigmas.numpy(), atol=2e-6)
