"""What the networks are, a file for each part of the model.

Field names are those of the published configs. A default is what a config that omits the key means, so it equals
the default of the reference class, not necessarily the value of a release.
"""

from dataclasses import dataclass

from ltx2_cli.diffusion.geometry import Compression
from ltx2_cli.models.arch.autoencoders import AudioVAEArch, VideoVAEArch
from ltx2_cli.models.arch.connectors import ConnectorsArch
from ltx2_cli.models.arch.scheduler import PUBLISHED_SCHEDULE, SchedulerArch
from ltx2_cli.models.arch.transformer import StreamArch, TransformerArch
from ltx2_cli.models.arch.vocoder import BandwidthVocoderArch, VocoderArch

__all__ = [
    "PUBLISHED_SCHEDULE",
    "Arch",
    "AudioVAEArch",
    "BandwidthVocoderArch",
    "ConnectorsArch",
    "SchedulerArch",
    "StreamArch",
    "TransformerArch",
    "VideoVAEArch",
    "VocoderArch",
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
    def generation(self) -> str:
        """The model profile whose defaults were published for such networks."""
        return self.transformer.generation

    @property
    def compression(self) -> Compression:
        """How the autoencoders divide a clip."""
        audio, factor = self.audio_vae, 2 ** (len(self.audio_vae.ch_mult) - 1)
        rate = audio.sample_rate / audio.mel_hop_length / factor
        return Compression(self.video_vae.temporal_compression_ratio, self.video_vae.spatial_compression_ratio, rate)

    @property
    def head_sizes(self) -> frozenset[int]:
        """The channels of a head in every attention that these networks have."""
        streams, connectors = self.transformer.streams, self.connectors
        sizes = (connectors.video_connector_attention_head_dim, connectors.audio_connector_attention_head_dim)
        return frozenset({*sizes, *(stream.head_dim for stream in streams)})
