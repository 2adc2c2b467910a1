"""What the networks are, a file for each part of the model.

Field names are those of the published configs. A default is what a config that omits the key means, so it equals
the default of the reference class, not necessarily the value of a release.
"""

from dataclasses import dataclass

from ltx2_cli.diffusion.geometry import VAECompression
from ltx2_cli.models.arch.autoencoders import AudioVAEArch, VideoVAEArch
from ltx2_cli.models.arch.transformer import (
    PUBLISHED_SCHEDULE,
    ConnectorArch,
    ConnectorsArch,
    SchedulerArch,
    StreamArch,
    TransformerArch,
)
from ltx2_cli.models.arch.vocoder import VocoderArch, VocoderWithBWEArch

__all__ = [
    "PUBLISHED_SCHEDULE",
    "Arch",
    "AudioVAEArch",
    "ConnectorArch",
    "ConnectorsArch",
    "SchedulerArch",
    "StreamArch",
    "TransformerArch",
    "VideoVAEArch",
    "VocoderArch",
    "VocoderWithBWEArch",
]


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
    def model_version(self) -> str:
        """The model profile whose defaults were published for such networks."""
        return self.transformer.model_version

    @property
    def compression(self) -> VAECompression:
        """How the autoencoders divide a clip."""
        audio, factor = self.audio_vae, 2 ** (len(self.audio_vae.ch_mult) - 1)
        rate = audio.sample_rate / audio.mel_hop_length / factor
        return VAECompression(self.video_vae.temporal_compression_ratio, self.video_vae.spatial_compression_ratio, rate)

    @property
    def head_sizes(self) -> frozenset[int]:
        """The channels of a head in every attention that these networks have."""
        return frozenset(part.head_dim for part in (*self.transformer.streams, *self.connectors.connectors))
