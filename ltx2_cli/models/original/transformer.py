"""The denoiser and the connectors of a single file, which share a section of its config."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ltx2_cli.models.arch import AudioVAEArch, ConnectorsArch, TransformerArch, VideoVAEArch
from ltx2_cli.models.config import Config, NetworkArch
from ltx2_cli.models.original.sections import same


@dataclass(frozen=True, kw_only=True)
class OriginalTransformer(NetworkArch):
    """The denoiser and the connectors before it, which share a section."""

    in_channels: int
    out_channels: int
    num_attention_heads: int
    attention_head_dim: int
    cross_attention_dim: int
    positional_embedding_max_pos: tuple[int, int, int]  # seconds, rows, columns
    audio_out_channels: int
    audio_num_attention_heads: int
    audio_attention_head_dim: int
    audio_cross_attention_dim: int
    audio_positional_embedding_max_pos: tuple[int]  # seconds
    num_layers: int
    positional_embedding_theta: float
    av_ca_timestep_scale_multiplier: float
    apply_gated_attention: bool = False
    cross_attention_adaln: bool = False
    ff_bias: bool = True
    audio_ff_bias: bool = True
    caption_channels: int
    # text comes to the streams' widths before the connectors, by one projection each, or in the denoiser, by two
    caption_proj_before_connector: bool = False
    caption_projection_first_linear: bool | None = None  # what the key above leaves
    caption_projection_second_linear: bool | None = None
    text_encoder_norm_type: str | None = None
    connector_num_layers: int
    connector_num_attention_heads: int
    connector_attention_head_dim: int
    audio_connector_num_attention_heads: int | None = None  # as in the video connector
    audio_connector_attention_head_dim: int | None = None
    connector_num_learnable_registers: int
    connector_positional_embedding_max_pos: tuple[int]  # tokens
    connector_apply_gated_attention: bool = False

    only: ClassVar[Config] = {
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
        "attention_type": "default",
        "av_cross_ada_norm": True,
        "caption_proj_input_norm": False,
        "causal_temporal_positioning": True,
        "connector_norm_output": True,
        "cross_attention_norm": True,
        "frequencies_precision": "float64",
        "norm_eps": 1e-6,
        "positional_embedding_type": "rope",
        "qk_norm": "rms_norm",
        "rope_type": "split",
        "standardization_norm": "rms_norm",
        "timestep_scale_multiplier": 1000,
        "use_audio_video_cross_attention": True,
        "use_embeddings_connector": True,
        "use_keyframes_abs_pos_embedding": False,
        "use_middle_indices_grid": True,
        "use_prompt_adaln_single": True,
    }
    # no shape tells of these, and every release states them
    omitted: ClassVar[Config] = dict.fromkeys(
        (
            "causal_temporal_positioning",
            "frequencies_precision",
            "norm_eps",
            "rope_type",
            "timestep_scale_multiplier",
            "use_middle_indices_grid",
        )
    )
    unread: ClassVar[frozenset[str]] = frozenset(
        {"connector_learnable_registers_std", "dropout", "norm_num_groups", "num_embeds_ada_norm"}
    )

    def conflicts(self) -> Iterator[str]:
        before = self.caption_proj_before_connector
        given = f"while caption_proj_before_connector is {before}"
        norm = "per_token_rms" if before else None
        if self.text_encoder_norm_type != norm:
            yield f"text_encoder_norm_type is {self.text_encoder_norm_type!r} {given}, only {norm!r} is"
        if before in (self.caption_projection_first_linear, self.caption_projection_second_linear):
            yield f"caption_projection_first_linear or caption_projection_second_linear is {before} {given}"

    def transformer(self, video_vae: VideoVAEArch, audio_vae: AudioVAEArch) -> TransformerArch:
        """The denoiser of the latents that these autoencoders make."""
        time, space = video_vae.temporal_compression_ratio, video_vae.spatial_compression_ratio
        seconds, height, width = self.positional_embedding_max_pos
        return TransformerArch(
            **same(self, TransformerArch),
            vae_scale_factors=(time, space, space),
            pos_embed_max_pos=seconds,
            base_height=height,
            base_width=width,
            gated_attn=self.apply_gated_attention,
            cross_attn_mod=self.cross_attention_adaln,
            audio_in_channels=self.audio_out_channels,
            audio_scale_factor=2 ** (len(audio_vae.ch_mult) - 1),
            audio_pos_embed_max_pos=self.audio_positional_embedding_max_pos[0],
            audio_sampling_rate=audio_vae.sample_rate,
            audio_hop_length=audio_vae.mel_hop_length,
            audio_gated_attn=self.apply_gated_attention,
            audio_cross_attn_mod=self.cross_attention_adaln,
            rope_theta=self.positional_embedding_theta,
            cross_attn_timestep_scale_multiplier=self.av_ca_timestep_scale_multiplier,
            use_prompt_embeddings=not self.caption_proj_before_connector,
            perturbed_attn=True,  # no key for it: what runs these files perturbs whenever asked
        )

    def connectors(self, text_features: int) -> ConnectorsArch:
        """The connectors to a text encoder that gives so many numbers of a token, all its hidden states counted."""
        heads, head_dim = self.connector_num_attention_heads, self.connector_attention_head_dim
        return ConnectorsArch(
            caption_channels=self.caption_channels,
            text_proj_in_factor=text_features // self.caption_channels,
            video_connector_num_attention_heads=heads,
            video_connector_attention_head_dim=head_dim,
            video_connector_num_layers=self.connector_num_layers,
            video_connector_num_learnable_registers=self.connector_num_learnable_registers,
            audio_connector_num_attention_heads=self.audio_connector_num_attention_heads or heads,
            audio_connector_attention_head_dim=self.audio_connector_attention_head_dim or head_dim,
            audio_connector_num_layers=self.connector_num_layers,
            audio_connector_num_learnable_registers=self.connector_num_learnable_registers,
            video_gated_attn=self.connector_apply_gated_attention,
            audio_gated_attn=self.connector_apply_gated_attention,
            connector_rope_base_seq_len=self.connector_positional_embedding_max_pos[0],
            per_modality_projections=self.caption_proj_before_connector,
            video_hidden_dim=self.cross_attention_dim,
            audio_hidden_dim=self.audio_cross_attention_dim,
            proj_bias=self.caption_proj_before_connector,
        )
