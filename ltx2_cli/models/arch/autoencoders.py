"""The autoencoders of video and of sound."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ltx2_cli.models.config import LTX2, LTX2_3, Config, NetworkArch


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
    per_level: ClassVar[Config] = {
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
    def model_version(self) -> str | None:
        mode = self.decoder_spatial_padding_mode
        if all(self.upsample_residual) and mode == "reflect":
            return LTX2
        return LTX2_3 if not any(self.upsample_residual) and mode == "zeros" else None

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
    per_level: ClassVar[Config] = {"attn_resolutions": None}
    unread: ClassVar[frozenset[str]] = frozenset({"dropout", "resolution"})

    def conflicts(self) -> Iterator[str]:
        if len(self.ch_mult) != 3 or self.mel_bins % 4:
            yield "only three levels (len(ch_mult)) and mel_bins that divide by 4 are"

    @property
    def features(self) -> int:
        """Numbers of a latent: all its channels and mel bins."""
        return self.latent_channels * self.latent_mels

    @property
    def mel_channels(self) -> int:
        """Mel bins of all channels of the sound."""
        return self.output_channels * self.mel_bins

    @property
    def latent_mels(self) -> int:
        """Mel bins of a latent."""
        return self.mel_bins // 2 ** (len(self.ch_mult) - 1)
