"""What turns the text encoder's features into the text that each stream reads."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ltx2_cli.models.config import EARLIER, LATER, Config, NetworkArch
from ltx2_cli.spec import AV


@dataclass(frozen=True)
class ConnectorsArch(NetworkArch):
    """Text features and the two connectors."""

    caption_channels: int = 3840
    text_proj_in_factor: int = 49
    video_connector_num_attention_heads: int = 30
    video_connector_attention_head_dim: int = 128
    video_connector_num_layers: int = 2
    video_connector_num_learnable_registers: int = 128
    audio_connector_num_attention_heads: int = 30
    audio_connector_attention_head_dim: int = 128
    audio_connector_num_layers: int = 2
    audio_connector_num_learnable_registers: int = 128
    video_gated_attn: bool = False
    audio_gated_attn: bool = False
    connector_rope_base_seq_len: int = 4096
    rope_theta: float = 10000.0
    per_modality_projections: bool = False
    video_hidden_dim: int = 4096
    audio_hidden_dim: int = 2048
    proj_bias: bool = False

    only: ClassVar[Config] = {"rope_double_precision": True, "rope_type": "split"}
    omitted: ClassVar[Config] = {"rope_type": "interleaved"}
    unread: ClassVar[frozenset[str]] = frozenset({"causal_temporal_positioning"})

    @property
    def generation(self) -> str:
        return LATER if self.per_modality_projections else EARLIER

    @property
    def widths(self) -> AV[int]:
        """Channels of each stream's features, which its connector must share."""
        if self.per_modality_projections:
            return AV(self.video_hidden_dim, self.audio_hidden_dim)
        return AV(self.caption_channels, self.caption_channels)

    def conflicts(self) -> Iterator[str]:
        for stream, heads, head_dim, features in (
            (
                "video",
                self.video_connector_num_attention_heads,
                self.video_connector_attention_head_dim,
                self.widths.video,
            ),
            (
                "audio",
                self.audio_connector_num_attention_heads,
                self.audio_connector_attention_head_dim,
                self.widths.audio,
            ),
        ):
            if heads * head_dim != features:
                yield f"the {stream} connector is {heads * head_dim} wide, its features {features}"
            if head_dim % 2:
                yield f"{stream}_connector_attention_head_dim is odd, and heads are rotated in halves"
