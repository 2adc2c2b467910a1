"""What the networks are.

Field names are those of the published configs. A default is what a config that omits the key means, so it equals
the default of the reference class, not necessarily the value of a release.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ltx2_cli.diffusion.geometry import Compression, Scales
from ltx2_cli.diffusion.schedule import Schedule
from ltx2_cli.models.config import Config, NetworkArch
from ltx2_cli.spec import AV

EARLIER, LATER = "ltx2", "ltx2.3"  # generations, by the names of their model profiles


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


@dataclass(frozen=True)
class VideoVAEArch(NetworkArch):
    """The video autoencoder. Decoder lists run shallow to deep, but for `upsample_type`."""

    in_channels: int = 3
    out_channels: int = 3
    latent_channels: int = 128
    block_out_channels: tuple[int, ...] = (256, 512, 1024, 2048)
    decoder_block_out_channels: tuple[int, ...] = (256, 512, 1024)
    layers_per_block: tuple[int, ...] = (4, 6, 6, 2, 2)
    decoder_layers_per_block: tuple[int, ...] = (5, 5, 5, 5)
    downsample_type: tuple[str, ...] = ("spatial", "temporal", "spatiotemporal", "spatiotemporal")
    upsample_type: tuple[str, ...] = ("spatiotemporal", "spatiotemporal", "spatiotemporal")
    upsample_residual: tuple[bool, ...] = (True, True, True)
    upsample_factor: tuple[int, ...] = (2, 2, 2)
    patch_size: int = 4
    encoder_causal: bool = True
    decoder_causal: bool = True
    encoder_spatial_padding_mode: str = "zeros"
    decoder_spatial_padding_mode: str = "reflect"
    spatial_compression_ratio: int = 32
    temporal_compression_ratio: int = 8

    only: ClassVar[Config] = {"timestep_conditioning": False, "scaling_factor": 1.0, "patch_size_t": 1}
    each: ClassVar[Config] = {
        "down_block_types": "LTX2VideoDownBlock3D",
        "spatio_temporal_scaling": True,
        "decoder_spatio_temporal_scaling": True,
        "decoder_inject_noise": False,
    }
    unread: ClassVar[frozenset[str]] = frozenset({"resnet_norm_eps"})

    def conflicts(self) -> Iterator[str]:
        for mode in sorted(
            {self.encoder_spatial_padding_mode, self.decoder_spatial_padding_mode} - {"zeros", "reflect"}
        ):
            yield f"a spatial padding mode is {mode!r}, only 'zeros' and 'reflect' are"
        for kind in sorted({*self.downsample_type, *self.upsample_type} - {"spatial", "temporal", "spatiotemporal"}):
            yield f"a resampling type is {kind!r}, only 'spatial', 'temporal' and 'spatiotemporal' are"
        if not len(self.layers_per_block) - 1 == len(self.block_out_channels) == len(self.downsample_type):
            yield "the encoder's lists differ in length"
        deep_first = self.decoder_block_out_channels[::-1]
        stages = (deep_first, self.upsample_factor, self.upsample_residual, self.upsample_type)
        if {len(stage) for stage in stages} != {len(self.decoder_layers_per_block) - 1}:
            yield "the decoder's lists differ in length"
        chain = zip(deep_first, self.upsample_factor[::-1], deep_first[1:], strict=False)
        if any(deep // factor != shallow for deep, factor, shallow in chain):
            yield "decoder_block_out_channels do not shrink by upsample_factor"
        for direction, kinds in (("encoder", self.downsample_type), ("decoder", self.upsample_type)):
            frames = 2 ** sum(kind != "spatial" for kind in kinds)
            pixels = self.patch_size * 2 ** sum(kind != "temporal" for kind in kinds)
            if (frames, pixels) != (self.temporal_compression_ratio, self.spatial_compression_ratio):
                yield (
                    f"the {direction} divides by {frames} and {pixels}, the compression ratios are"
                    f" {self.temporal_compression_ratio} and {self.spatial_compression_ratio}"
                )

    @property
    def generation(self) -> str | None:
        mode = self.decoder_spatial_padding_mode
        if all(self.upsample_residual) and mode == "reflect":
            return EARLIER
        return LATER if not any(self.upsample_residual) and mode == "zeros" else None

    @property
    def smallest(self) -> int:
        """Pixels that a frame needs at least in height and width: mirroring takes a cell beside the border's."""
        return self.spatial_compression_ratio * (2 if self.decoder_spatial_padding_mode == "reflect" else 1)


@dataclass(frozen=True)
class AudioVAEArch(NetworkArch):
    """The audio autoencoder over stereo log-mel spectrograms."""

    base_channels: int = 128
    output_channels: int = 2
    ch_mult: tuple[int, ...] = (1, 2, 4)
    num_res_blocks: int = 2
    in_channels: int = 2
    latent_channels: int = 8
    sample_rate: int = 16000
    mel_hop_length: int = 160
    mel_bins: int = 64

    only: ClassVar[Config] = {
        "norm_type": "pixel",
        "causality_axis": "height",
        "mid_block_add_attention": False,
        "is_causal": True,
        "double_z": True,
    }
    each: ClassVar[Config] = {"attn_resolutions": None}
    unread: ClassVar[frozenset[str]] = frozenset({"dropout", "resolution"})

    def conflicts(self) -> Iterator[str]:
        if len(self.ch_mult) != 3 or self.mel_bins % 4:
            yield "only three levels (len(ch_mult)) and mel_bins that divide by 4 are"

    @property
    def latent_mels(self) -> int:
        """Mel bins of a latent."""
        return self.mel_bins // 2 ** (len(self.ch_mult) - 1)


@dataclass(frozen=True)
class VocoderArch(NetworkArch):
    """Mel spectrogram to waveform, by one generator."""

    in_channels: int = 128
    hidden_channels: int = 1024
    out_channels: int = 2
    upsample_kernel_sizes: tuple[int, ...] = (16, 15, 8, 4, 4)
    upsample_factors: tuple[int, ...] = (6, 5, 2, 2, 2)
    resnet_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    resnet_dilations: tuple[tuple[int, ...], ...] = ((1, 3, 5), (1, 3, 5), (1, 3, 5))
    act_fn: str = "leaky_relu"
    leaky_relu_negative_slope: float = 0.1
    antialias: bool = False
    antialias_ratio: int = 2
    antialias_kernel_size: int = 12
    final_act_fn: str | None = "tanh"
    final_bias: bool = True
    output_sampling_rate: int = 24000

    nullable: ClassVar[frozenset[str]] = frozenset({"final_act_fn"})

    @property
    def generation(self) -> str:
        return EARLIER

    def conflicts(self) -> Iterator[str]:
        if (self.act_fn, self.antialias) not in (("leaky_relu", False), ("snakebeta", True)):
            yield (
                f"act_fn is {self.act_fn!r} with antialias {self.antialias},"
                " only 'leaky_relu' without and 'snakebeta' with it are"
            )
        if self.final_act_fn not in ("tanh", "clamp", None):
            yield f"final_act_fn is {self.final_act_fn!r}, only 'tanh', 'clamp' and None are"
        if self.antialias_kernel_size < 2 * self.antialias_ratio:
            yield "antialias_kernel_size is less than twice antialias_ratio"
        if len(self.upsample_kernel_sizes) != len(self.upsample_factors):
            yield "upsample_kernel_sizes and upsample_factors differ in length"
        if len(self.resnet_kernel_sizes) != len(self.resnet_dilations):
            yield "resnet_kernel_sizes and resnet_dilations differ in length"
        if self.hidden_channels < 2 ** len(self.upsample_factors):
            yield f"hidden_channels cannot be halved {len(self.upsample_factors)} times"


@dataclass(frozen=True)
class BandwidthVocoderArch(VocoderArch):
    """Mel spectrogram to waveform, by two generators: the first as in `VocoderArch` at `input_sampling_rate`, the
    second adds what `output_sampling_rate` has room for."""

    hidden_channels: int = 1536
    upsample_kernel_sizes: tuple[int, ...] = (11, 4, 4, 4, 4, 4)
    upsample_factors: tuple[int, ...] = (5, 2, 2, 2, 2, 2)
    act_fn: str = "snakebeta"
    antialias: bool = True
    final_act_fn: str | None = None
    final_bias: bool = False
    bwe_in_channels: int = 128
    bwe_hidden_channels: int = 512
    bwe_out_channels: int = 2
    bwe_upsample_kernel_sizes: tuple[int, ...] = (12, 11, 4, 4, 4)
    bwe_upsample_factors: tuple[int, ...] = (6, 5, 2, 2, 2)
    bwe_resnet_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    bwe_resnet_dilations: tuple[tuple[int, ...], ...] = ((1, 3, 5), (1, 3, 5), (1, 3, 5))
    bwe_act_fn: str = "snakebeta"
    bwe_leaky_relu_negative_slope: float = 0.1
    bwe_antialias: bool = True
    bwe_antialias_ratio: int = 2
    bwe_antialias_kernel_size: int = 12
    bwe_final_act_fn: str | None = None
    bwe_final_bias: bool = False
    filter_length: int = 512
    hop_length: int = 80
    window_length: int = 512
    num_mel_channels: int = 64
    input_sampling_rate: int = 16000
    output_sampling_rate: int = 48000

    @property
    def generation(self) -> str:
        return LATER

    @property
    def extension(self) -> VocoderArch:
        """The second generator."""
        return VocoderArch(
            in_channels=self.bwe_in_channels,
            hidden_channels=self.bwe_hidden_channels,
            out_channels=self.bwe_out_channels,
            upsample_kernel_sizes=self.bwe_upsample_kernel_sizes,
            upsample_factors=self.bwe_upsample_factors,
            resnet_kernel_sizes=self.bwe_resnet_kernel_sizes,
            resnet_dilations=self.bwe_resnet_dilations,
            act_fn=self.bwe_act_fn,
            leaky_relu_negative_slope=self.bwe_leaky_relu_negative_slope,
            antialias=self.bwe_antialias,
            antialias_ratio=self.bwe_antialias_ratio,
            antialias_kernel_size=self.bwe_antialias_kernel_size,
            final_act_fn=self.bwe_final_act_fn,
            final_bias=self.bwe_final_bias,
            output_sampling_rate=self.output_sampling_rate,
        )

    @property
    def ratio(self) -> int:
        """Samples out for each sample of the first generator."""
        return self.output_sampling_rate // self.input_sampling_rate

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        yield from (f"of the second generator, {conflict}" for conflict in self.extension.conflicts())
        hop, extended = self.hop_length * self.ratio, math.prod(self.bwe_upsample_factors)
        mels = self.out_channels * self.num_mel_channels
        if self.output_sampling_rate % self.input_sampling_rate:
            yield "output_sampling_rate is no multiple of input_sampling_rate"
        if hop != extended:
            yield f"the second generator makes {extended} samples of a hop, which lasts {hop}"
        if any((k - f) % 2 for k, f in zip(self.bwe_upsample_kernel_sizes, self.bwe_upsample_factors, strict=False)):
            yield "a factor of the second generator is odd and its kernel size even, or the other way round"
        if mels != self.bwe_in_channels:
            yield f"the second generator takes {self.bwe_in_channels} channels, its spectrograms have {mels}"
        if self.out_channels != self.bwe_out_channels:
            yield "out_channels and bwe_out_channels differ"
        if not 0 <= self.window_length - self.filter_length < self.hop_length:
            yield "filter_length and window_length give more or fewer spectra than hops"


@dataclass(frozen=True)
class SchedulerArch(Schedule, NetworkArch):
    """The noise levels a checkpoint was made for."""

    only: ClassVar[Config] = {
        "num_train_timesteps": 1000,
        "time_shift_type": "exponential",
        "invert_sigmas": False,
        "use_karras_sigmas": False,
        "use_exponential_sigmas": False,
        "use_beta_sigmas": False,
        "stochastic_sampling": False,
    }
    signed: ClassVar[frozenset[str]] = frozenset({"base_shift", "max_shift", "shift_terminal"})

    def conflicts(self) -> Iterator[str]:
        if not 0 <= (self.shift_terminal or 0) < 1:
            yield f"shift_terminal is {self.shift_terminal}, only from 0 to below 1 is"
        if self.base_image_seq_len == self.max_image_seq_len:
            yield "base_image_seq_len and max_image_seq_len are equal"


PUBLISHED_SCHEDULE = SchedulerArch(
    use_dynamic_shifting=True,
    base_shift=0.95,
    max_shift=2.05,
    base_image_seq_len=1024,
    max_image_seq_len=4096,
    shift_terminal=0.1,
)


@dataclass(frozen=True)
class Arch:
    """Every network of one checkpoint but the text encoder, whose config belongs to transformers."""

    transformer: TransformerArch
    connectors: ConnectorsArch
    video_vae: VideoVAEArch
    audio_vae: AudioVAEArch
    vocoder: VocoderArch
    scheduler: SchedulerArch

    @property
    def generation(self) -> str:
        """The model profile whose defaults were published for such networks."""
        return self.transformer.generation

    @property
    def compression(self) -> Compression:
        """How the autoencoders divide a clip."""
        audio, factor = self.audio_vae, 2 ** (len(self.audio_vae.ch_mult) - 1)
        rate = audio.sample_rate / audio.mel_hop_length / factor
        return Compression(self.video_vae.temporal_compression_ratio, self.video_vae.spatial_compression_ratio, rate)
