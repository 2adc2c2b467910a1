"""The config in the metadata of the published single files, read into the project's own architecture."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from diffusers import AutoencoderKLLTX2Video

from ltx2_cli.models.arch import (
    Arch,
    AudioVAEArch,
    BandwidthVocoderArch,
    ConnectorsArch,
    SchedulerArch,
    TransformerArch,
    VideoVAEArch,
    VocoderArch,
)
from ltx2_cli.models.audio_vae import AudioVAE
from ltx2_cli.models.bandwidth import build_vocoder
from ltx2_cli.models.config import Config
from ltx2_cli.models.connectors import TextConnectors
from ltx2_cli.models.networks import ARCHS as ORDER
from ltx2_cli.models.original.config import original_archs
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.models.video_vae import VideoVAE
from ltx2_cli.spec import SpecError
from ltx2_cli.weights.declare import Scope, declared
from ltx2_cli.weights.findings import refuse
from parity import published

KEYS = Path(__file__).parents[2] / "keys"
STATES = 49

LTX23 = json.loads((KEYS / "ltx2.3" / "embedded_config.json").read_text())
LATER = {  # keys of the transformer that LTX-2 does not have
    "apply_gated_attention",
    "audio_connector_attention_head_dim",
    "audio_connector_num_attention_heads",
    "caption_proj_before_connector",
    "caption_proj_input_norm",
    "caption_projection_first_linear",
    "caption_projection_second_linear",
    "connector_apply_gated_attention",
    "connector_learnable_registers_std",
    "cross_attention_adaln",
    "text_encoder_norm_type",
}
LTX2_RESIDUAL = ["res_x", {"num_layers": 5, "inject_noise": False}]
LTX2_UPSAMPLING = ["compress_all", {"residual": True, "multiplier": 2}]
LTX2 = LTX23 | {
    "transformer": {key: value for key, value in LTX23["transformer"].items() if key not in LATER}
    | {"connector_num_attention_heads": 30, "connector_num_layers": 2},
    "vae": {
        "_class_name": "CausalVideoAutoencoder",
        "dims": 3,
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 128,
        "encoder_blocks": [
            ["res_x", {"num_layers": 4}],
            ["compress_space_res", {"multiplier": 2}],
            ["res_x", {"num_layers": 6}],
            ["compress_time_res", {"multiplier": 2}],
            ["res_x", {"num_layers": 6}],
            ["compress_all_res", {"multiplier": 2}],
            ["res_x", {"num_layers": 2}],
            ["compress_all_res", {"multiplier": 2}],
            ["res_x", {"num_layers": 2}],
        ],
        "decoder_blocks": [*[LTX2_RESIDUAL, LTX2_UPSAMPLING] * 3, LTX2_RESIDUAL],
        "norm_layer": "pixel_norm",
        "patch_size": 4,
        "latent_log_var": "uniform",
        "causal_decoder": False,
        "timestep_conditioning": False,
    },
    "vocoder": {
        "upsample_initial_channel": 1024,
        "resblock": "1",
        "upsample_rates": [6, 5, 2, 2, 2],
        "upsample_kernel_sizes": [16, 15, 8, 4, 4],
        "resblock_kernel_sizes": [3, 7, 11],
        "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
        "stereo": True,
    },
}
# no list reads the same from behind, and the two directions are unlike
UNLIKE_VAE = {
    "in_channels": 4,
    "out_channels": 2,
    "latent_channels": 8,
    "patch_size": 2,
    "encoder_blocks": [
        ["res_x", {"num_layers": 1}],
        ["compress_space_res", {"multiplier": 2}],
        ["res_x", {"num_layers": 4}],
        ["compress_space_res", {"multiplier": 4}],
        ["res_x", {"num_layers": 2}],
        ["compress_all_res", {"multiplier": 1}],
        ["res_x", {"num_layers": 3}],
    ],
    "decoder_blocks": [
        ["res_x", {"num_layers": 2}],
        ["compress_all", {"multiplier": 4}],
        ["res_x", {"num_layers": 5}],
        ["compress_space", {"multiplier": 1}],
        ["res_x", {"num_layers": 1}],
        ["compress_space", {"multiplier": 2, "residual": True}],
        ["res_x", {"num_layers": 3}],
    ],
    "encoder_base_channels": 8,
    "decoder_base_channels": 4,
    "causal_decoder": True,
    "spatial_padding_mode": "reflect",
}
UNLIKE_VIDEO_VAE = VideoVAEArch(
    in_channels=4,
    out_channels=2,
    latent_channels=8,
    patch_size=2,
    layers_per_block=(1, 4, 2, 3),
    downsample_type=("spatial", "spatial", "spatiotemporal"),
    block_out_channels=(16, 64, 64),
    decoder_layers_per_block=(2, 5, 1, 3),
    upsample_type=("spatial", "spatial", "spatiotemporal"),
    upsample_factor=(4, 1, 2),
    upsample_residual=(False, False, True),
    decoder_block_out_channels=(16, 16, 32),
    encoder_causal=True,
    decoder_causal=True,
    encoder_spatial_padding_mode="reflect",
    decoder_spatial_padding_mode="reflect",
    spatial_compression_ratio=16,
    temporal_compression_ratio=2,
)

TRANSFORMER = TransformerArch(
    in_channels=128,
    out_channels=128,
    num_attention_heads=32,
    attention_head_dim=128,
    cross_attention_dim=4096,
    vae_scale_factors=(8, 32, 32),
    pos_embed_max_pos=20,
    base_height=2048,
    base_width=2048,
    gated_attn=False,
    cross_attn_mod=False,
    audio_in_channels=128,
    audio_out_channels=128,
    audio_num_attention_heads=32,
    audio_attention_head_dim=64,
    audio_cross_attention_dim=2048,
    audio_scale_factor=4,
    audio_pos_embed_max_pos=20,
    audio_sampling_rate=16000,
    audio_hop_length=160,
    audio_gated_attn=False,
    audio_cross_attn_mod=False,
    num_layers=48,
    norm_eps=1e-6,
    caption_channels=3840,
    rope_theta=10000.0,
    causal_offset=1,
    timestep_scale_multiplier=1000,
    cross_attn_timestep_scale_multiplier=1000,
    use_prompt_embeddings=True,
    perturbed_attn=True,
    ff_bias=True,
    audio_ff_bias=True,
)
CONNECTORS = ConnectorsArch(
    caption_channels=3840,
    text_proj_in_factor=49,
    video_connector_num_attention_heads=30,
    video_connector_attention_head_dim=128,
    video_connector_num_layers=2,
    video_connector_num_learnable_registers=128,
    audio_connector_num_attention_heads=30,
    audio_connector_attention_head_dim=128,
    audio_connector_num_layers=2,
    audio_connector_num_learnable_registers=128,
    video_gated_attn=False,
    audio_gated_attn=False,
    connector_rope_base_seq_len=4096,
    rope_theta=10000.0,
    per_modality_projections=False,
    video_hidden_dim=4096,
    audio_hidden_dim=2048,
    proj_bias=False,
)
VIDEO_VAE = VideoVAEArch(
    in_channels=3,
    out_channels=3,
    latent_channels=128,
    block_out_channels=(256, 512, 1024, 2048),
    decoder_block_out_channels=(256, 512, 1024),
    layers_per_block=(4, 6, 6, 2, 2),
    decoder_layers_per_block=(5, 5, 5, 5),
    downsample_type=("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
    upsample_type=("spatiotemporal", "spatiotemporal", "spatiotemporal"),
    upsample_residual=(True, True, True),
    upsample_factor=(2, 2, 2),
    patch_size=4,
    encoder_causal=True,
    decoder_causal=False,
    encoder_spatial_padding_mode="zeros",
    decoder_spatial_padding_mode="reflect",
    spatial_compression_ratio=32,
    temporal_compression_ratio=8,
)
AUDIO_VAE = AudioVAEArch(
    base_channels=128,
    output_channels=2,
    ch_mult=(1, 2, 4),
    num_res_blocks=2,
    in_channels=2,
    latent_channels=8,
    sample_rate=16000,
    mel_hop_length=160,
    mel_bins=64,
)
VOCODER = VocoderArch(
    in_channels=128,
    hidden_channels=1024,
    out_channels=2,
    upsample_kernel_sizes=(16, 15, 8, 4, 4),
    upsample_factors=(6, 5, 2, 2, 2),
    resnet_kernel_sizes=(3, 7, 11),
    resnet_dilations=((1, 3, 5), (1, 3, 5), (1, 3, 5)),
    act_fn="leaky_relu",
    leaky_relu_negative_slope=0.1,
    antialias=False,
    final_act_fn="tanh",
    final_bias=True,
    output_sampling_rate=24000,
)
EXTENDED_VOCODER = BandwidthVocoderArch(
    in_channels=128,
    hidden_channels=1536,
    out_channels=2,
    upsample_kernel_sizes=(11, 4, 4, 4, 4, 4),
    upsample_factors=(5, 2, 2, 2, 2, 2),
    resnet_kernel_sizes=(3, 7, 11),
    resnet_dilations=((1, 3, 5), (1, 3, 5), (1, 3, 5)),
    act_fn="snakebeta",
    antialias=True,
    antialias_ratio=2,
    antialias_kernel_size=12,
    final_act_fn=None,
    final_bias=False,
    bwe_in_channels=128,
    bwe_hidden_channels=512,
    bwe_out_channels=2,
    bwe_upsample_kernel_sizes=(12, 11, 4, 4, 4),
    bwe_upsample_factors=(6, 5, 2, 2, 2),
    bwe_resnet_kernel_sizes=(3, 7, 11),
    bwe_resnet_dilations=((1, 3, 5), (1, 3, 5), (1, 3, 5)),
    bwe_act_fn="snakebeta",
    bwe_antialias=True,
    bwe_antialias_ratio=2,
    bwe_antialias_kernel_size=12,
    bwe_final_act_fn=None,
    bwe_final_bias=False,
    filter_length=512,
    hop_length=80,
    window_length=512,
    num_mel_channels=64,
    input_sampling_rate=16000,
    output_sampling_rate=48000,
)
SCHEDULER = SchedulerArch(
    use_dynamic_shifting=True,
    base_shift=0.95,
    max_shift=2.05,
    base_image_seq_len=1024,
    max_image_seq_len=4096,
    shift_terminal=0.1,
)
ARCHS = {
    "ltx2": Arch(TRANSFORMER, CONNECTORS, VIDEO_VAE, AUDIO_VAE, VOCODER, SCHEDULER),
    "ltx2.3": Arch(
        replace(
            TRANSFORMER,
            gated_attn=True,
            cross_attn_mod=True,
            audio_gated_attn=True,
            audio_cross_attn_mod=True,
            use_prompt_embeddings=False,
        ),
        replace(
            CONNECTORS,
            video_connector_num_attention_heads=32,
            video_connector_num_layers=8,
            audio_connector_num_attention_heads=32,
            audio_connector_attention_head_dim=64,
            audio_connector_num_layers=8,
            video_gated_attn=True,
            audio_gated_attn=True,
            per_modality_projections=True,
            proj_bias=True,
        ),
        replace(
            VIDEO_VAE,
            block_out_channels=(256, 512, 1024, 1024),
            layers_per_block=(4, 6, 4, 2, 2),
            decoder_block_out_channels=(256, 512, 512, 1024),
            decoder_layers_per_block=(4, 6, 4, 2, 2),
            upsample_type=("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
            upsample_residual=(False, False, False, False),
            upsample_factor=(2, 2, 1, 2),
            decoder_spatial_padding_mode="zeros",
        ),
        AUDIO_VAE,
        EXTENDED_VOCODER,
        SCHEDULER,
    ),
}
CONFIGS = {"ltx2": LTX2, "ltx2.3": LTX23}
NETWORKS: dict[str, Callable[[Scope, Arch], Any]] = {
    "transformer": lambda scope, arch: Transformer(scope, arch.transformer),
    "connectors": lambda scope, arch: TextConnectors(scope, arch.connectors),
    "vae": lambda scope, arch: VideoVAE(scope, arch.video_vae),
    "audio_vae": lambda scope, arch: AudioVAE(scope, arch.audio_vae),
    "vocoder": lambda scope, arch: build_vocoder(scope, arch.vocoder),
}
DDCONFIG = "audio_vae.model.params.ddconfig"


def read(config: Config, text_states: int = STATES) -> Arch:
    features = text_states * ((config.get("transformer") or {}).get("caption_channels") or 1)
    archs, problems = original_archs(config, lambda: features, "model.safetensors")
    refuse(problems)
    return Arch(*(archs[name] for name in ORDER))


def parent(config: Config, path: str) -> tuple[Any, Any]:
    """Where the value at `path` lies, and under which key or index; numbers count in lists."""
    *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    return reduce(lambda inner, step: inner[step], way, config), last


def changed(config: Config, *changes: tuple[str, Any]) -> Config:
    """`config` with other values, each at a path."""
    config = deepcopy(config)
    for path, value in changes:
        inner, last = parent(config, path)
        inner[last] = value
    return config


def without(config: Config, path: str) -> Config:
    config = deepcopy(config)
    inner, last = parent(config, path)
    del inner[last]
    return config


def refusal(config: Config) -> str:
    with pytest.raises(SpecError) as caught:
        read(config)
    assert str(caught.value).startswith("model.safetensors")
    assert "--model" in caught.value.hint
    return str(caught.value)


@pytest.mark.parametrize("model", CONFIGS)
def test_a_published_config_gives_the_published_arch(model: str) -> None:
    assert read(CONFIGS[model]) == ARCHS[model]


@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize("network", NETWORKS)
def test_networks_of_a_published_config_declare_the_published_tensors(model: str, network: str) -> None:
    folder = "ltx2" if network == "audio_vae" else model
    module = NETWORKS[network](Scope("bfloat16"), read(CONFIGS[model]))
    assert declared(module) == published(f"{folder}/{network}.tsv")


def test_block_lists_give_every_level_its_own_numbers() -> None:
    arch = read(LTX23 | {"vae": UNLIKE_VAE})
    assert arch.video_vae == UNLIKE_VIDEO_VAE
    assert arch.transformer.vae_scale_factors == (2, 16, 16)
    reference = AutoencoderKLLTX2Video(
        **asdict(arch.video_vae),
        down_block_types=("LTX2VideoDownBlock3D",) * 3,
        spatio_temporal_scaling=(True,) * 3,
        decoder_spatio_temporal_scaling=(True,) * 3,
        decoder_inject_noise=(False,) * 4,
    )
    wanted = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    assert declared(VideoVAE(Scope("float32"), arch.video_vae)) == wanted


@pytest.mark.parametrize(
    ("modes", "encoder", "decoder"),
    [
        ({}, "zeros", "reflect"),
        ({"spatial_padding_mode": "zeros"}, "zeros", "zeros"),
        ({"spatial_padding_mode": "reflect"}, "reflect", "reflect"),
        ({"encoder_spatial_padding_mode": "reflect", "decoder_spatial_padding_mode": "zeros"}, "reflect", "zeros"),
    ],
)
def test_each_direction_has_its_borders(modes: Config, encoder: str, decoder: str) -> None:
    arch = read(LTX2 | {"vae": LTX2["vae"] | modes}).video_vae
    assert (arch.encoder_spatial_padding_mode, arch.decoder_spatial_padding_mode) == (encoder, decoder)


def test_numbers_of_the_transformer_come_from_its_own_keys() -> None:
    sizes = {
        "in_channels": 1,
        "out_channels": 2,
        "num_attention_heads": 3,
        "attention_head_dim": 4,
        "cross_attention_dim": 12,
        "audio_out_channels": 6,
        "audio_num_attention_heads": 3,
        "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 24,
        "num_layers": 10,
        "caption_channels": 13 * 14,
        "ff_bias": False,
    }
    others = {
        "positional_embedding_theta": 15.0,
        "positional_embedding_max_pos": [16, 17, 18],
        "audio_positional_embedding_max_pos": [19],
        "av_ca_timestep_scale_multiplier": 20,
        "connector_num_attention_heads": 13,
        "connector_attention_head_dim": 14,
        "connector_num_layers": 21,
        "connector_num_learnable_registers": 22,
        "connector_positional_embedding_max_pos": [23],
    }
    arch = read(LTX2 | {"transformer": LTX2["transformer"] | sizes | others}, text_states=25)
    assert arch.transformer == replace(
        TRANSFORMER,
        **sizes,
        audio_in_channels=6,
        rope_theta=15.0,
        pos_embed_max_pos=16,
        base_height=17,
        base_width=18,
        audio_pos_embed_max_pos=19,
        cross_attn_timestep_scale_multiplier=20,
    )
    assert arch.connectors == replace(
        CONNECTORS,
        caption_channels=13 * 14,
        text_proj_in_factor=25,
        video_hidden_dim=12,
        audio_hidden_dim=24,
        connector_rope_base_seq_len=23,
        **{
            f"{stream}_connector_{name}": value
            for stream in ("video", "audio")
            for name, value in (
                ("num_attention_heads", 13),
                ("attention_head_dim", 14),
                ("num_layers", 21),
                ("num_learnable_registers", 22),
            )
        },
    )


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("apply_gated_attention", {"gated_attn": True, "audio_gated_attn": True}),
        ("cross_attention_adaln", {"cross_attn_mod": True, "audio_cross_attn_mod": True}),
    ],
)
def test_a_switch_of_the_transformer_is_for_both_streams_and_nothing_else(key: str, fields: Config) -> None:
    arch = read(changed(LTX2, (f"transformer.{key}", True)))
    assert arch == replace(ARCHS["ltx2"], transformer=replace(TRANSFORMER, **fields))


def test_the_connectors_gates_are_switched_on_their_own() -> None:
    arch = read(changed(LTX2, ("transformer.connector_apply_gated_attention", True)))
    gated = replace(CONNECTORS, video_gated_attn=True, audio_gated_attn=True)
    assert arch == replace(ARCHS["ltx2"], connectors=gated)


def test_each_connector_has_its_own_heads() -> None:
    heads = {"audio_connector_num_attention_heads": 16, "audio_connector_attention_head_dim": 128}
    arch = read(LTX23 | {"transformer": LTX23["transformer"] | heads})
    assert arch.connectors == replace(ARCHS["ltx2.3"].connectors, **heads)


def test_numbers_of_the_audio_autoencoder_come_from_its_own_keys_and_reach_its_neighbours() -> None:
    numbers = {
        "ch": 1,
        "out_ch": 3,
        "ch_mult": [3, 4, 9],
        "num_res_blocks": 5,
        "in_channels": 6,
        "z_channels": 7,
        "mel_bins": 8,
    }
    arch = read(
        changed(
            LTX2,
            *((f"{DDCONFIG}.{key}", value) for key, value in numbers.items()),
            ("audio_vae.model.params.sampling_rate", 9000),
            ("audio_vae.preprocessing.stft.hop_length", 10),
        )
    )
    assert arch.audio_vae == AudioVAEArch(
        base_channels=1,
        output_channels=3,
        ch_mult=(3, 4, 9),
        num_res_blocks=5,
        in_channels=6,
        latent_channels=7,
        mel_bins=8,
        sample_rate=9000,
        mel_hop_length=10,
    )
    assert arch.transformer == replace(TRANSFORMER, audio_sampling_rate=9000, audio_hop_length=10)
    assert arch.vocoder == replace(VOCODER, in_channels=16, output_sampling_rate=9000 * 240 // 10)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"use_tanh_at_final": False}, {"final_act_fn": "clamp"}),
        ({"use_tanh_at_final": False, "apply_final_activation": False}, {"final_act_fn": None}),
        ({"use_bias_at_final": False}, {"final_bias": False}),
        ({"resblock": "AMP1", "activation": "snakebeta"}, {"act_fn": "snakebeta", "antialias": True}),
        ({"output_sample_rate": 24000}, {}),
        ({"output_sampling_rate": 24000}, {}),
        (
            {
                "upsample_rates": [3, 2],
                "upsample_kernel_sizes": [5, 4],
                "upsample_initial_channel": 12,
                "resblock_kernel_sizes": [7],
                "resblock_dilation_sizes": [[1, 2]],
            },
            {
                "upsample_factors": (3, 2),
                "upsample_kernel_sizes": (5, 4),
                "hidden_channels": 12,
                "resnet_kernel_sizes": (7,),
                "resnet_dilations": ((1, 2),),
                "output_sampling_rate": 600,
            },
        ),
    ],
)
def test_a_vocoder_of_one_generator(changes: Config, fields: Config) -> None:
    assert read(LTX2 | {"vocoder": LTX2["vocoder"] | changes}).vocoder == replace(VOCODER, **fields)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"vocoder.use_tanh_at_final": True}, {"final_act_fn": "tanh"}),
        ({"bwe.apply_final_activation": True}, {"bwe_final_act_fn": "clamp"}),
        ({"bwe.use_bias_at_final": True}, {"bwe_final_bias": True}),
        ({"vocoder.upsample_initial_channel": 64}, {"hidden_channels": 64}),
        ({"bwe.upsample_initial_channel": 32}, {"bwe_hidden_channels": 32}),
        ({"bwe.num_mels": 32}, {"num_mel_channels": 32, "bwe_in_channels": 64}),
        ({"bwe.n_fft": 128, "bwe.win_size": 130}, {"filter_length": 128, "window_length": 130}),
        (
            {"bwe.hop_length": 160, "bwe.upsample_rates": [6, 5, 2, 2, 4]},
            {"hop_length": 160, "bwe_upsample_factors": (6, 5, 2, 2, 4)},
        ),
        (
            {"bwe.output_sampling_rate": 32000, "bwe.upsample_rates": [4, 5, 2, 2, 2]},
            {"output_sampling_rate": 32000, "bwe_upsample_factors": (4, 5, 2, 2, 2)},
        ),
    ],
)
def test_a_vocoder_of_two_generators(changes: Config, fields: Config) -> None:
    config = changed(LTX23, *((f"vocoder.{path}", value) for path, value in changes.items()))
    assert read(config).vocoder == replace(EXTENDED_VOCODER, **fields)


def test_both_generators_follow_the_spectrograms_rate() -> None:
    rates = {"input_sampling_rate": 32000, "output_sampling_rate": 96000}
    changes = [(f"vocoder.bwe.{key}", rate) for key, rate in rates.items()]
    config = changed(LTX23, ("audio_vae.model.params.sampling_rate", 32000), *changes)
    assert read(config).vocoder == replace(EXTENDED_VOCODER, **rates)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("transformer.dropout", 0.5),
        ("transformer.norm_num_groups", 4),
        ("transformer.num_embeds_ada_norm", 4),
        ("transformer.connector_learnable_registers_std", 4),
        ("transformer.new_and_off", False),
        ("transformer.new_and_null", None),
        ("vae.new_and_off", 0),
        ("scheduler", {"sampler": "another"}),
        (f"{DDCONFIG}.dropout", 0.5),
        (f"{DDCONFIG}.resolution", 512),
        (f"{DDCONFIG}.attn_resolutions", None),
        ("vocoder.bwe.new_and_empty", []),
    ],
)
def test_what_changes_nothing_is_read_over(path: str, value: Any) -> None:
    assert read(changed(LTX23, (path, value))) == ARCHS["ltx2.3"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(
            (f"transformer.{key}", value)
            for key, value in {
                "activation_fn": "silu",
                "attention_bias": False,
                "attention_type": "gated",
                "av_cross_ada_norm": False,
                "caption_proj_input_norm": True,
                "caption_projection_first_linear": True,
                "caption_projection_second_linear": True,
                "causal_temporal_positioning": False,
                "connector_norm_output": False,
                "cross_attention_norm": False,
                "double_self_attention": True,
                "frequencies_precision": "float32",
                "norm_elementwise_affine": True,
                "norm_eps": 1e-5,
                "num_vector_embeds": 8,
                "only_cross_attention": True,
                "positional_embedding_type": "learned",
                "qk_norm": "layer_norm",
                "rope_type": "interleaved",
                "share_ff": True,
                "standardization_norm": "layer_norm",
                "text_encoder_norm_type": "per_layer",
                "timestep_scale_multiplier": 500,
                "upcast_attention": True,
                "use_audio_video_cross_attention": False,
                "use_embeddings_connector": False,
                "use_keyframes_abs_pos_embedding": True,
                "use_linear_projection": True,
                "use_middle_indices_grid": False,
                "use_prompt_adaln_single": False,
                "positional_embedding_max_pos": [20, 2048],
                "audio_positional_embedding_max_pos": [20, 2048],
                "connector_positional_embedding_max_pos": [64, 64],
                "new_and_on": True,
            }.items()
        ),
        *(
            (f"vae.{key}", value)
            for key, value in {
                "dims": 2,
                "latent_log_var": "constant",
                "norm_layer": "group_norm",
                "normalize_latent_channels": True,
                "scaling_factor": 0.5,
                "timestep_conditioning": True,
                "use_quant_conv": True,
                "encoder_base_channels": 64,
                "new_and_on": True,
            }.items()
        ),
        *(
            (f"{DDCONFIG}.{key}", value)
            for key, value in {
                "attn_resolutions": [64],
                "causality_axis": "width",
                "double_z": False,
                "downsample_time": True,
                "is_causal": False,
                "mid_block_add_attention": True,
                "norm_type": "group",
                "resamp_with_conv": False,
                "new_and_on": True,
            }.items()
        ),
        ("vocoder.vocoder.stereo", False),
        ("vocoder.vocoder.resblock", "AMP2"),
        ("vocoder.vocoder.activation", "snake"),
        ("vocoder.vocoder.upsample_kernel_sizes", [11, 4]),
        ("vocoder.vocoder.upsample_rates", [5.0]),
        ("vocoder.vocoder.apply_final_activation", False),
        ("vocoder.vocoder.new_and_on", True),
        ("vocoder.bwe.stereo", False),
        ("vocoder.bwe.activation", None),
        ("vocoder.bwe.input_sampling_rate", 8000),
        ("vocoder.bwe.output_sampling_rate", 44100),
        ("vocoder.bwe.new_and_on", True),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(path: str, value: Any) -> None:
    said = refusal(changed(LTX23, (path, value)))
    assert "this model is not implemented" in said
    assert path.rpartition(".")[2] in said


@pytest.mark.parametrize(
    "path",
    ["transformer.caption_proj_input_norm", "transformer.use_keyframes_abs_pos_embedding", "vae.timestep_conditioning"],
)
def test_what_must_be_off_says_so(path: str) -> None:
    assert f"{path.rpartition('.')[2]} is True, only False is" in refusal(changed(LTX23, (path, True)))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("transformer.caption_projection_first_linear", False),
        ("transformer.text_encoder_norm_type", "per_token_rms"),
        ("vocoder.output_sample_rate", 48000),
        ("vocoder.output_sampling_rate", 48000),
        ("vocoder.activation", "snakebeta"),
    ],
)
def test_a_key_that_does_not_fit_the_older_model_is_refused(path: str, value: Any) -> None:
    said = refusal(changed(LTX2, (path, value)))
    assert path.rpartition(".")[2] in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"transformer.num_attention_heads": 16}, "same number of attention heads"),
        ({"transformer.connector_attention_head_dim": 64}, "video connector is 2048 wide, its features 4096"),
        ({"transformer.audio_cross_attention_dim": 1024}, "audio connector is 2048 wide, its features 1024"),
        ({"vae.spatial_padding_mode": "replicate"}, "a spatial padding mode is 'replicate'"),
        ({"vae.encoder_spatial_padding_mode": "replicate"}, "a spatial padding mode is 'replicate'"),
        ({"vae.decoder_spatial_padding_mode": "replicate"}, "a spatial padding mode is 'replicate'"),
        ({"vocoder.vocoder.upsample_rates": [5, 2]}, "input_sampling_rate is 16000, the first generator makes 1000"),
        ({"vocoder.vocoder.resblock_kernel_sizes": [3]}, "resnet_kernel_sizes and resnet_dilations differ"),
        ({"vae.encoder_blocks.1.0": "compress_time_res"}, "encoder_blocks and decoder_blocks differ"),
        ({"vocoder.bwe.num_mels": 32, "vocoder.bwe.win_size": 1024}, "filter_length and window_length"),
    ],
)
def test_networks_that_do_not_go_together_are_refused(changes: Config, said: str) -> None:
    assert said in refusal(changed(LTX23, *changes.items()))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("vae.encoder_blocks.1", ["compress_all", {"multiplier": 2}], "'compress_all' is not known, only res_x, "),
        ("vae.decoder_blocks.1", ["compress_all_res", {"multiplier": 2}], "'compress_all_res' is not known"),
        ("vae.decoder_blocks.8", ["attn_res_x", {"num_layers": 2}], "'attn_res_x' is not known"),
        ("vae.encoder_blocks.1", ["res_x", {"num_layers": 2}], "only res_x with one other between each two"),
        ("vae.encoder_blocks", [["res_x", {"num_layers": 2}], ["compress_all_res", {"multiplier": 2}]], "only res_x"),
        ("vae.encoder_blocks", ["res_x"], "encoder_blocks is ['res_x']"),
        ("vae.encoder_blocks.0.1", 4, "encoder_blocks is "),
        ("vae.encoder_blocks.0.1", {}, "encoder_blocks, res_x: the config lacks num_layers"),
        ("vae.decoder_blocks.1.1", {"residual": True}, "decoder_blocks, compress_space: the config lacks multiplier"),
        ("vae.decoder_blocks.0.1.inject_noise", True, "inject_noise is True"),
        ("vae.decoder_blocks.0.1.attention_head_dim", 64, "attention_head_dim (is 64) is not known"),
        ("vae.encoder_blocks.1.1.residual", True, "residual is True"),
    ],
)
def test_blocks_that_are_not_implemented_are_refused(path: str, value: Any, said: str) -> None:
    assert said in refusal(changed(LTX23, (path, value)))


@pytest.mark.parametrize(
    "path",
    [
        "transformer",
        "vae",
        "audio_vae",
        "audio_vae.model",
        DDCONFIG,
        "audio_vae.model.params.sampling_rate",
        "audio_vae.preprocessing",
        "audio_vae.preprocessing.stft.hop_length",
        "vocoder",
        "vocoder.vocoder",
        "transformer.num_layers",
        "transformer.norm_eps",
        "transformer.timestep_scale_multiplier",
        "transformer.positional_embedding_theta",
        "transformer.positional_embedding_max_pos",
        "transformer.av_ca_timestep_scale_multiplier",
        "transformer.connector_num_layers",
        "transformer.rope_type",
        "transformer.frequencies_precision",
        "transformer.causal_temporal_positioning",
        "transformer.use_middle_indices_grid",
        "transformer.text_encoder_norm_type",
        "vae.latent_channels",
        "vae.causal_decoder",
        "vae.encoder_blocks",
        "vae.decoder_blocks",
        f"{DDCONFIG}.z_channels",
        "vocoder.vocoder.upsample_rates",
        "vocoder.bwe.hop_length",
        "vocoder.bwe.num_mels",
        "vocoder.bwe.input_sampling_rate",
    ],
)
def test_what_every_release_states_is_missed_by_name(path: str) -> None:
    assert path.rpartition(".")[2] in refusal(without(LTX23, path))
    assert path.rpartition(".")[2] in refusal(changed(LTX23, (path, None)))


def test_everything_a_section_lacks_is_said_at_once() -> None:
    said = refusal(without(without(LTX2, "transformer.num_layers"), "transformer.in_channels"))
    assert said == "model.safetensors, transformer: the config lacks in_channels, num_layers"
