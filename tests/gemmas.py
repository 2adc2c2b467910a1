"""Configs of small text encoders."""

ALTERNATING = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,  # in two turns of a loop
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "query_pre_attn_scalar": 12,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
LISTED = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "query_pre_attn_scalar": 7,
    "sliding_window": 3,
    "layer_types": ["full_attention", *2 * ["sliding_attention"], "full_attention"],
    "rope_theta": 3000.0,
    "rope_local_base_freq": 50.0,
    "rms_norm_eps": 1e-3,
    "attention_bias": True,
}
FOURTH = {  # Gemma-4
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 12,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 5,
    "layer_types": 2 * ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 700.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
    "rms_norm_eps": 1e-3,
}


def config(text: dict) -> dict:
    return {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **text}, "vision_config": {}}
