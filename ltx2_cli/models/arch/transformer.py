"""The denoiser and its two streams."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ltx2_cli.diffusion.geometry import Scales
from ltx2_cli.models.config import EARLIER, LATER, Config, NetworkArch
from ltx2_cli.spec import AV


@dataclass(frozen=True)
class StreamArch:
    """One half of the denoiser: the sizes of the video stream or of the audio stream."""

    name: str
    prefix: str  # of its weights' names, where the two differ by a prefix alone
    gate: str  # what its cross-modal gate is called
    in_channels: int
    out_channels: int
    heads: int
    head_dim: int
    text_width: int
    caption_channels: int  # 0: text arrives at the stream's width
    gated: bool
    text_modulated: bool
    feed_forward_bias: bool
    max_positions: tuple[int, ...]

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

    only: ClassVar[Config] = {
        "patch_size": 1,
        "patch_size_t": 1,
        "audio_patch_size": 1,
        "audio_patch_size_t": 1,
        "activation_fn": "gelu-approximate",
        "qk_norm": "rms_norm_across_heads",
        "norm_elementwise_affine": False,
        "attention_bias": True,
        "attention_out_bias": True,
        "rope_double_precision": True,
        "rope_type": "split",
        "use_prompt_adaln_single": True,
        "use_keyframes_abs_pos_embedding": False,
    }
    omitted: ClassVar[Config] = {"rope_type": "interleaved"}

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
    def generation(self) -> str:
        return LATER if self.cross_attn_mod else EARLIER

    @property
    def streams(self) -> AV[StreamArch]:
        """The two halves."""
        caption = self.caption_channels if self.use_prompt_embeddings else 0
        video = StreamArch(
            name="video",
            prefix="",
            gate="a2v",
            in_channels=self.in_channels,
            out_channels=self.out_channels,
            heads=self.num_attention_heads,
            head_dim=self.attention_head_dim,
            text_width=self.cross_attention_dim,
            caption_channels=caption,
            gated=self.gated_attn,
            text_modulated=self.cross_attn_mod,
            feed_forward_bias=self.ff_bias,
            max_positions=(self.pos_embed_max_pos, self.base_height, self.base_width),
        )
        audio = StreamArch(
            name="audio",
            prefix="audio_",
            gate="v2a",
            in_channels=self.audio_in_channels,
            out_channels=self.audio_out_channels,
            heads=self.audio_num_attention_heads,
            head_dim=self.audio_attention_head_dim,
            text_width=self.audio_cross_attention_dim,
            caption_channels=caption,
            gated=self.audio_gated_attn,
            text_modulated=self.audio_cross_attn_mod,
            feed_forward_bias=self.audio_ff_bias,
            max_positions=(self.audio_pos_embed_max_pos,),
        )
        return AV(video, audio)

    @property
    def scales(self) -> Scales:
        """How latents lie in time and space."""
        time, height, width = self.vae_scale_factors
        mel = (self.audio_scale_factor, self.audio_hop_length, self.audio_sampling_rate)
        return Scales(time, height, width, *mel, self.causal_offset)
