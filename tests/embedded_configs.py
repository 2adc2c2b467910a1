"""The configs in the metadata of the published single files, by model version: LTX-2.3's own, and LTX-2's after it."""

import json
from pathlib import Path

LTX23 = json.loads((Path(__file__).parent / "keys" / "ltx2.3" / "embedded_config.json").read_text())
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
NATIVE = {"ltx2": LTX2, "ltx2.3": LTX23}
