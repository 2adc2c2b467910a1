"""The vocoders of the two model versions."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

from ltx2_cli.models.config import LTX2, LTX2_3, NetworkArch


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
    def model_version(self) -> str:
        return LTX2

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
class VocoderWithBWEArch(VocoderArch):
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
    def model_version(self) -> str:
        return LTX2_3

    @property
    def bwe(self) -> VocoderArch:
        """The second generator."""
        values = vars(self)
        return VocoderArch(**{key.name: values.get(f"bwe_{key.name}", values[key.name]) for key in fields(VocoderArch)})

    @property
    def ratio(self) -> int:
        """Samples out for each sample of the first generator."""
        return self.output_sampling_rate // self.input_sampling_rate

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        yield from (f"of the second generator, {conflict}" for conflict in self.bwe.conflicts())
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
