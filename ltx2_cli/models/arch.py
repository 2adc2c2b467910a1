"""Architectures of the networks: classes of the configs, with the published configs' names. A default is the meaning of
an omitted key: the reference class's default, not necessarily that of a release."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ltx2_cli.diffusion.denoise import Schedule
from ltx2_cli.diffusion.geometry import LatentScale, VAECompression
from ltx2_cli.models.audio_vae import AudioVAEArch
from ltx2_cli.models.config import LTX2, LTX2_3, LTX2_5, NetworkArch
from ltx2_cli.models.gemma import GEMMA_3, GEMMA_4, GemmaArch
from ltx2_cli.models.video_vae import VideoVAEArch
from ltx2_cli.models.vocoder import VocoderArch
from ltx2_cli.request.spec import Streams

HEAD_KEYS = ("num_attention_heads", "attention_head_dim")
# The keys of the last fields of a `StreamArch` and a `ConnectorArch`, without the prefix of a stream.
CHANNEL_KEYS = ("in_channels", "out_channels")
STREAM_KEYS = (*CHANNEL_KEYS, *HEAD_KEYS, "cross_attention_dim", "gated_attn", "cross_attn_mod", "ff_bias")
CONNECTOR_KEYS = (*(f"connector_{key}" for key in (*HEAD_KEYS, "num_layers", "num_learnable_registers")), "gated_attn")


class StreamArch(NamedTuple):
    """One half of the denoiser: the sizes of the video stream or of the audio stream."""

    name: str
    prefix: str  # of its weights' names, where the two differ by a prefix alone
    gate: str  # the name of its cross-modal gate
    max_positions: tuple[int, ...]
    caption_channels: int  # 0: text arrives at the stream's width
    marks_keyframes: bool  # a learnt vector is added to tokens whose latent frame is one frame of pixels
    in_channels: int
    out_channels: int
    heads: int
    head_dim: int
    text_width: int
    gated: bool
    text_modulated: bool
    feed_forward_bias: bool

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.heads * self.head_dim

    @property
    def context_width(self) -> int:
        """Channels of the text that comes from the connectors."""
        return self.caption_channels or self.text_width


@dataclass(frozen=True)
class TransformerArch(NetworkArch):
    """The audio-video denoiser."""

    in_channels: int = 128
    out_channels: int = 128
    num_attention_heads: int = 32
    attention_head_dim: int = 128
    cross_attention_dim: int = 4096
    vae_scale_factors: tuple[int, int, int] = (8, 32, 32)
    pos_embed_max_pos: int = 20
    base_height: int = 2048
    base_width: int = 2048
    gated_attn: bool = False
    cross_attn_mod: bool = False
    audio_in_channels: int = 128
    audio_out_channels: int = 128
    audio_num_attention_heads: int = 32
    audio_attention_head_dim: int = 64
    audio_cross_attention_dim: int = 2048
    audio_scale_factor: int = 4
    audio_pos_embed_max_pos: int = 20
    audio_sampling_rate: int = 16000
    audio_hop_length: int = 160
    audio_gated_attn: bool = False
    audio_cross_attn_mod: bool = False
    num_layers: int = 48
    norm_eps: float = 1e-6
    caption_channels: int = 3840
    rope_theta: float = 10000.0
    causal_offset: int = 1
    timestep_scale_multiplier: float = 1000
    cross_attn_timestep_scale_multiplier: float = 1000
    use_prompt_embeddings: bool = True
    perturbed_attn: bool = False
    ff_bias: bool = True
    audio_ff_bias: bool = True
    use_keyframes_abs_pos_embedding: bool = False

    def conflicts(self) -> Iterator[str]:
        if self.num_attention_heads != self.audio_num_attention_heads:
            yield "video and audio need the same number of attention heads: their cross attention shares them"
        if self.cross_attn_mod != self.audio_cross_attn_mod:
            yield "cross_attn_mod and audio_cross_attn_mod differ"
        for stream in self.streams:
            if stream.head_dim % 2:
                yield f"{stream.prefix}attention_head_dim is odd, and heads are rotated in halves"
            if stream.caption_channels and stream.text_width != stream.width:
                yield f"{stream.prefix}cross_attention_dim is {stream.text_width}, text is projected to {stream.width}"

    @property
    def model_version(self) -> str:
        newer = LTX2_5 if self.use_keyframes_abs_pos_embedding else LTX2_3
        return newer if self.cross_attn_mod else LTX2

    @property
    def text_encoder(self) -> str:
        """The generation of the text encoder that it was trained with."""
        return GEMMA_4 if self.model_version == LTX2_5 else GEMMA_3

    @property
    def streams(self) -> Streams[StreamArch]:
        """The two halves."""
        caption_channels = self.caption_channels if self.use_prompt_embeddings else 0
        video, audio = ([vars(self)[prefix + key] for key in STREAM_KEYS] for prefix in ("", "audio_"))
        positions = self.pos_embed_max_pos, self.base_height, self.base_width
        return Streams(
            StreamArch("video", "", "a2v", positions, caption_channels, self.use_keyframes_abs_pos_embedding, *video),
            StreamArch("audio", "audio_", "v2a", (self.audio_pos_embed_max_pos,), caption_channels, False, *audio),
        )

    @property
    def scales(self) -> LatentScale:
        """Extent of latents in time and space."""
        mel = self.audio_scale_factor, self.audio_hop_length, self.audio_sampling_rate
        return LatentScale(*self.vae_scale_factors, *mel, self.causal_offset)


class ConnectorArch(NamedTuple):
    """The sizes of one stream's connector."""

    heads: int
    head_dim: int
    layers: int
    registers: int
    gated: bool

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.heads * self.head_dim


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

    @property
    def model_version(self) -> str:
        return LTX2_3 if self.per_modality_projections else LTX2

    @property
    def widths(self) -> Streams[int]:
        """Channels of each stream's features, which its connector must share."""
        if self.per_modality_projections:
            return Streams(self.video_hidden_dim, self.audio_hidden_dim)
        return Streams(self.caption_channels, self.caption_channels)

    @property
    def connectors(self) -> Streams[ConnectorArch]:
        """The sizes of each stream's connector."""
        sizes = ([vars(self)[f"{stream}_{key}"] for key in CONNECTOR_KEYS] for stream in Streams._fields)
        return Streams(*(ConnectorArch(*values) for values in sizes))

    def conflicts(self) -> Iterator[str]:
        for stream, connector, features in zip(Streams._fields, self.connectors, self.widths, strict=True):
            if connector.width != features:
                yield f"the {stream} connector is {connector.width} wide, its features {features}"
            if connector.head_dim % 2:
                yield f"{stream}_connector_attention_head_dim is odd, and heads are rotated in halves"


@dataclass(frozen=True)
class SchedulerArch(Schedule, NetworkArch):
    """The noise levels a checkpoint was made for."""

    def conflicts(self) -> Iterator[str]:
        if not 0 <= (self.shift_terminal or 0) < 1:
            yield f"shift_terminal is {self.shift_terminal}, only from 0 to below 1 is"
        if self.base_image_seq_len == self.max_image_seq_len:
            yield "base_image_seq_len and max_image_seq_len are equal"


@dataclass(frozen=True)
class Arch:
    """Every network of one checkpoint, by the name of its folder, and the schedule."""

    transformer: TransformerArch
    connectors: ConnectorsArch
    vae: VideoVAEArch
    audio_vae: AudioVAEArch
    vocoder: VocoderArch
    scheduler: SchedulerArch
    text_encoder: GemmaArch

    @property
    def model_version(self) -> str:
        """The model profile whose defaults were published for such networks."""
        return self.transformer.model_version

    @property
    def compression(self) -> VAECompression:
        """Compression by the autoencoders."""
        rate = self.audio_vae.spectra_rate / self.audio_vae.compression
        return VAECompression(self.vae.temporal_compression_ratio, self.vae.spatial_compression_ratio, rate)

    @property
    def head_sizes(self) -> frozenset[int]:
        """The channels of a head in every attention that these networks have."""
        return frozenset(part.head_dim for part in (*self.transformer.streams, *self.connectors.connectors))
