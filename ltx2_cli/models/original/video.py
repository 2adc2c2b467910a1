"""The video autoencoder of a single file, whose config lists its blocks one by one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import ClassVar

from ltx2_cli.models.arch import VideoVAEArch
from ltx2_cli.models.config import Config, NetworkArch
from ltx2_cli.models.original.sections import described, refuse, section_of

Blocks = tuple[tuple[str, Config], ...]  # the kind of each and its options

RESIDUAL = "res_x"
# blocks between residual ones, by what they resample
ENCODER = {"compress_space_res": "spatial", "compress_time_res": "temporal", "compress_all_res": "spatiotemporal"}
DECODER = {"compress_space": "spatial", "compress_time": "temporal", "compress_all": "spatiotemporal"}


@dataclass(frozen=True)
class ResidualBlocks(NetworkArch):
    """Residual blocks of one level of the video autoencoder."""

    num_layers: int

    only: ClassVar[Config] = {"inject_noise": False}


@dataclass(frozen=True)
class Resampling(NetworkArch):
    """What lies between two levels: the deeper one has `multiplier` times the channels."""

    multiplier: int
    residual: bool = False


@dataclass(frozen=True)
class Stages:
    """One direction of the video autoencoder, from the pixels to the latents whichever way it runs."""

    layers: tuple[int, ...]  # residual blocks of each level
    types: tuple[str, ...]  # what is resampled between them
    multipliers: tuple[int, ...]
    residual: tuple[bool, ...]

    def widths(self, base: int) -> tuple[int, ...]:
        """Channels of each level but the first, which has `base`."""
        return tuple(accumulate(self.multipliers, mul, initial=base))[1:]

    @property
    def compression(self) -> tuple[int, int]:
        """Factors in time and in space."""
        return 2 ** sum(kind != "spatial" for kind in self.types), 2 ** sum(kind != "temporal" for kind in self.types)


@dataclass(frozen=True, kw_only=True)
class OriginalVideoVAE(NetworkArch):
    """The video autoencoder; the blocks of encoder and decoder are both listed from the pixels to the latents."""

    in_channels: int
    out_channels: int
    latent_channels: int
    patch_size: int
    causal_decoder: bool
    encoder_blocks: Blocks
    decoder_blocks: Blocks
    encoder_base_channels: int | None = None  # as many as the latents have
    decoder_base_channels: int | None = None
    spatial_padding_mode: str | None = None  # zeros in the encoder, reflect in the decoder
    encoder_spatial_padding_mode: str | None = None  # that of both
    decoder_spatial_padding_mode: str | None = None

    only: ClassVar[Config] = {
        "dims": 3,
        "latent_log_var": "uniform",
        "norm_layer": "pixel_norm",
        "scaling_factor": 1.0,
        "timestep_conditioning": False,
    }

    def conflicts(self) -> Iterator[str]:
        if self.encoder_base_channels not in (self.latent_channels, None):
            yield f"encoder_base_channels is {self.encoder_base_channels} and latent_channels {self.latent_channels}"

    def arch(self, encoder: Stages, decoder: Stages) -> VideoVAEArch:
        """The autoencoder of these blocks."""
        time, space = encoder.compression
        both = self.spatial_padding_mode
        return VideoVAEArch(
            in_channels=self.in_channels,
            out_channels=self.out_channels,
            latent_channels=self.latent_channels,
            block_out_channels=encoder.widths(self.latent_channels),
            decoder_block_out_channels=decoder.widths(self.decoder_base_channels or self.latent_channels),
            layers_per_block=encoder.layers,
            decoder_layers_per_block=decoder.layers,
            downsample_type=encoder.types,
            upsample_type=decoder.types[::-1],  # the one list in the order of execution
            upsample_residual=decoder.residual,
            upsample_factor=decoder.multipliers,
            patch_size=self.patch_size,
            decoder_causal=self.causal_decoder,
            encoder_spatial_padding_mode=self.encoder_spatial_padding_mode or both or "zeros",
            decoder_spatial_padding_mode=self.decoder_spatial_padding_mode or both or "reflect",
            spatial_compression_ratio=space * self.patch_size,
            temporal_compression_ratio=time,
        )


def read_video_vae(config: Config, where: str) -> VideoVAEArch:
    """The video autoencoder that a config describes; raises `SpecError` as `original_archs`."""
    vae = described(OriginalVideoVAE, section_of(config, where, "vae"), f"{where}, vae")
    encoder = _stages(vae.encoder_blocks, ENCODER, f"{where}, vae.encoder_blocks")
    decoder = _stages(vae.decoder_blocks, DECODER, f"{where}, vae.decoder_blocks")
    if any(encoder.residual):
        refuse(["residual is True in the encoder, where the kind of block says it"], f"{where}, vae.encoder_blocks")
    if encoder.compression != decoder.compression:
        refuse(["encoder_blocks and decoder_blocks differ in what they do to time and space"], f"{where}, vae")
    return vae.arch(encoder, decoder)


def _stages(blocks: Blocks, types: Mapping[str, str], where: str) -> Stages:
    """What `blocks` are: residual ones with one of `types` between each two."""
    known, kinds = (RESIDUAL, *types), [kind for kind, _ in blocks]
    refuse((f"{kind!r} is not known, only {', '.join(known)} are" for kind in kinds if kind not in known), where)
    if [kind == RESIDUAL for kind in kinds] != [place % 2 == 0 for place in range(len(kinds) | 1)]:
        refuse([f"the order is {', '.join(kinds)}, only {RESIDUAL} with one other between each two is"], where)
    levels = [described(ResidualBlocks, options, f"{where}, {kind}") for kind, options in blocks[::2]]
    between = [described(Resampling, options, f"{where}, {kind}") for kind, options in blocks[1::2]]
    return Stages(
        layers=tuple(level.num_layers for level in levels),
        types=tuple(types[kind] for kind in kinds[1::2]),
        multipliers=tuple(step.multiplier for step in between),
        residual=tuple(step.residual for step in between),
    )
