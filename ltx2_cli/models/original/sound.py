"""The audio autoencoder and the vocoder of a single file."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import ClassVar

from ltx2_cli.models.arch import AudioVAEArch, BandwidthVocoderArch, VocoderArch
from ltx2_cli.models.config import Config, NetworkArch
from ltx2_cli.models.original.sections import described, refuse, same, section_of

# a generator's `resblock` and `activation`: its activation's usual name, and whether it is kept from aliasing
GENERATORS = {("1", None): ("leaky_relu", False), ("AMP1", "snakebeta"): ("snakebeta", True)}
SOUND_CHANNELS = 2


@dataclass(frozen=True)
class OriginalAudioVAE(NetworkArch):
    """The audio autoencoder."""

    ch: int
    out_ch: int
    ch_mult: tuple[int, ...]
    num_res_blocks: int
    in_channels: int
    z_channels: int
    mel_bins: int
    sampling_rate: int
    hop_length: int

    only: ClassVar[Config] = {**AudioVAEArch.only, "resamp_with_conv": True}
    each: ClassVar[Config] = AudioVAEArch.each
    unread: ClassVar[frozenset[str]] = AudioVAEArch.unread

    def arch(self) -> AudioVAEArch:
        """The autoencoder."""
        return AudioVAEArch(
            **same(self, AudioVAEArch),
            base_channels=self.ch,
            output_channels=self.out_ch,
            latent_channels=self.z_channels,
            sample_rate=self.sampling_rate,
            mel_hop_length=self.hop_length,
        )


@dataclass(frozen=True, kw_only=True)
class OriginalGenerator(NetworkArch):
    """A vocoder, or one of the two generators of one."""

    upsample_initial_channel: int
    upsample_rates: tuple[int, ...]
    upsample_kernel_sizes: tuple[int, ...]
    resblock_kernel_sizes: tuple[int, ...]
    resblock_dilation_sizes: tuple[tuple[int, ...], ...]
    resblock: str = "1"
    activation: str | None = None
    use_tanh_at_final: bool = True
    use_bias_at_final: bool = True
    apply_final_activation: bool = True
    output_sample_rate: int | None = None  # what the upsampling makes; there are two spellings
    output_sampling_rate: int | None = None

    only: ClassVar[Config] = {"stereo": True}

    def conflicts(self) -> Iterator[str]:
        if (self.resblock, self.activation) not in GENERATORS:
            known = " and ".join(f"{block!r} with {activation!r}" for block, activation in GENERATORS)
            yield f"resblock is {self.resblock!r} with activation {self.activation!r}, only {known} are"

    def sampling_rate(self, spectra: int, hop_length: int, where: str) -> int:
        """Of the sound made from spectra that are `hop_length` samples apart at a sampling rate of `spectra`."""
        made = spectra * math.prod(self.upsample_rates) // hop_length
        stated = {"output_sample_rate": self.output_sample_rate, "output_sampling_rate": self.output_sampling_rate}
        wrong = {key: rate for key, rate in stated.items() if rate not in (made, None)}
        refuse((f"{key} is {wrong[key]}, the upsampling makes {made}" for key in wrong), where)
        return made

    def arch(self, mel_bins: int, sampling_rate: int) -> VocoderArch:
        """The generator of sound at `sampling_rate`."""
        act_fn, antialias = GENERATORS[self.resblock, self.activation]
        final = "tanh" if self.use_tanh_at_final else "clamp"
        return VocoderArch(
            in_channels=SOUND_CHANNELS * mel_bins,
            hidden_channels=self.upsample_initial_channel,
            out_channels=SOUND_CHANNELS,
            upsample_kernel_sizes=self.upsample_kernel_sizes,
            upsample_factors=self.upsample_rates,
            resnet_kernel_sizes=self.resblock_kernel_sizes,
            resnet_dilations=self.resblock_dilation_sizes,
            act_fn=act_fn,
            antialias=antialias,
            final_act_fn=final if self.apply_final_activation else None,
            final_bias=self.use_bias_at_final,
            output_sampling_rate=sampling_rate,
        )


@dataclass(frozen=True, kw_only=True)
class OriginalExtension(OriginalGenerator):
    """The second of two generators, which hears spectra of what the first one made."""

    input_sampling_rate: int
    hop_length: int
    n_fft: int
    win_size: int
    num_mels: int

    def after(self, first: VocoderArch, where: str) -> BandwidthVocoderArch:
        """Both generators."""
        if self.input_sampling_rate != first.output_sampling_rate:
            made = first.output_sampling_rate
            refuse([f"input_sampling_rate is {self.input_sampling_rate}, the first generator makes {made}"], where)
        if first.final_act_fn is None:
            refuse(["apply_final_activation of the first generator is False, only True is"], where)
        rate = self.sampling_rate(self.input_sampling_rate, self.hop_length, where)
        second = asdict(self.arch(self.num_mels, rate))
        del second["output_sampling_rate"]
        changed = {
            # the vocoder itself cuts the first waveform off at -1 and 1
            "final_act_fn": None if first.final_act_fn == "clamp" else first.final_act_fn,
            "filter_length": self.n_fft,
            "hop_length": self.hop_length,
            "window_length": self.win_size,
            "num_mel_channels": self.num_mels,
            "input_sampling_rate": self.input_sampling_rate,
            "output_sampling_rate": rate,
        }
        return BandwidthVocoderArch(**asdict(first) | {f"bwe_{name}": second[name] for name in second} | changed)


def read_audio_vae(config: Config, where: str) -> AudioVAEArch:
    """The audio autoencoder that a config describes; raises `SpecError` as `original_archs`."""
    params = section_of(config, where, "audio_vae", "model", "params")
    stft = section_of(config, where, "audio_vae", "preprocessing", "stft")
    spectra = {"sampling_rate": params.get("sampling_rate"), "hop_length": stft.get("hop_length")}
    section = section_of(params, f"{where}, audio_vae", "ddconfig") | spectra
    return described(OriginalAudioVAE, section, f"{where}, audio_vae").arch()


def read_vocoder(config: Config, audio_vae: AudioVAEArch, where: str) -> VocoderArch:
    """The vocoder of that autoencoder's spectrograms; raises `SpecError` as `original_archs`."""
    section, where = section_of(config, where, "vocoder"), f"{where}, vocoder"
    inner = section_of(section, where, "vocoder") if "bwe" in section else section
    generator = described(OriginalGenerator, inner, where)
    rate = generator.sampling_rate(audio_vae.sample_rate, audio_vae.mel_hop_length, where)
    arch = generator.arch(audio_vae.mel_bins, rate)
    if inner is section:
        return arch
    where = f"{where}.bwe"
    return described(OriginalExtension, section_of(section, where, "bwe"), where).after(arch, where)
