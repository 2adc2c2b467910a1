"""What the networks of a published single file are, read from the config in its metadata.

Key names are those of the files. A default is what leaving the key out means: older files lack the newer keys. A key
that every release states has none: a file without it is refused, as is every value that is not implemented.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import accumulate
from operator import mul
from typing import ClassVar, TypeVar

from ltx2_cli.models.arch import (
    PUBLISHED_SCHEDULE,
    Arch,
    AudioVAEArch,
    BandwidthVocoderArch,
    ConnectorsArch,
    TransformerArch,
    VideoVAEArch,
    VocoderArch,
)
from ltx2_cli.models.config import Config, NetworkArch, read_arch
from ltx2_cli.spec import SpecError

N = TypeVar("N", bound=NetworkArch)
Blocks = tuple[tuple[str, Config], ...]  # the kind of each and its options

RESIDUAL = "res_x"
# blocks between residual ones, by what they resample
ENCODER = {"compress_space_res": "spatial", "compress_time_res": "temporal", "compress_all_res": "spatiotemporal"}
DECODER = {"compress_space": "spatial", "compress_time": "temporal", "compress_all": "spatiotemporal"}
# a generator's `resblock` and `activation`: its activation's usual name, and whether it is kept from aliasing
GENERATORS = {("1", None): ("leaky_relu", False), ("AMP1", "snakebeta"): ("snakebeta", True)}
SOUND_CHANNELS = 2
HINT = "name another checkpoint: --model FOLDER or --model REPOSITORY"


@dataclass(frozen=True, kw_only=True)
class OriginalTransformer(NetworkArch):
    """The denoiser and the connectors before it, which share a section."""

    in_channels: int
    out_channels: int
    num_attention_heads: int
    attention_head_dim: int
    cross_attention_dim: int
    positional_embedding_max_pos: tuple[int, int, int]  # seconds, rows, columns
    audio_out_channels: int
    audio_num_attention_heads: int
    audio_attention_head_dim: int
    audio_cross_attention_dim: int
    audio_positional_embedding_max_pos: tuple[int]  # seconds
    num_layers: int
    positional_embedding_theta: float
    av_ca_timestep_scale_multiplier: float
    apply_gated_attention: bool = False
    cross_attention_adaln: bool = False
    ff_bias: bool = True
    audio_ff_bias: bool = True
    caption_channels: int
    # text comes to the streams' widths before the connectors, by one projection each, or in the denoiser, by two
    caption_proj_before_connector: bool = False
    caption_projection_first_linear: bool | None = None  # what the key above leaves
    caption_projection_second_linear: bool | None = None
    text_encoder_norm_type: str | None = None
    connector_num_layers: int
    connector_num_attention_heads: int
    connector_attention_head_dim: int
    audio_connector_num_attention_heads: int | None = None  # as in the video connector
    audio_connector_attention_head_dim: int | None = None
    connector_num_learnable_registers: int
    connector_positional_embedding_max_pos: tuple[int]  # tokens
    connector_apply_gated_attention: bool = False

    only: ClassVar[Config] = {
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
        "attention_type": "default",
        "av_cross_ada_norm": True,
        "caption_proj_input_norm": False,
        "causal_temporal_positioning": True,
        "connector_norm_output": True,
        "cross_attention_norm": True,
        "frequencies_precision": "float64",
        "norm_eps": 1e-6,
        "positional_embedding_type": "rope",
        "qk_norm": "rms_norm",
        "rope_type": "split",
        "standardization_norm": "rms_norm",
        "timestep_scale_multiplier": 1000,
        "use_audio_video_cross_attention": True,
        "use_embeddings_connector": True,
        "use_keyframes_abs_pos_embedding": False,
        "use_middle_indices_grid": True,
        "use_prompt_adaln_single": True,
    }
    # no shape tells of these, and every release states them
    omitted: ClassVar[Config] = dict.fromkeys(
        (
            "causal_temporal_positioning",
            "frequencies_precision",
            "norm_eps",
            "rope_type",
            "timestep_scale_multiplier",
            "use_middle_indices_grid",
        )
    )
    unread: ClassVar[frozenset[str]] = frozenset(
        {"connector_learnable_registers_std", "dropout", "norm_num_groups", "num_embeds_ada_norm"}
    )

    def conflicts(self) -> Iterator[str]:
        before = self.caption_proj_before_connector
        given = f"while caption_proj_before_connector is {before}"
        norm = "per_token_rms" if before else None
        if self.text_encoder_norm_type != norm:
            yield f"text_encoder_norm_type is {self.text_encoder_norm_type!r} {given}, only {norm!r} is"
        if before in (self.caption_projection_first_linear, self.caption_projection_second_linear):
            yield f"caption_projection_first_linear or caption_projection_second_linear is {before} {given}"

    def transformer(self, video_vae: VideoVAEArch, audio_vae: AudioVAEArch) -> TransformerArch:
        """The denoiser of the latents that these autoencoders make."""
        time, space = video_vae.temporal_compression_ratio, video_vae.spatial_compression_ratio
        seconds, height, width = self.positional_embedding_max_pos
        return TransformerArch(
            **_same(self, TransformerArch),
            vae_scale_factors=(time, space, space),
            pos_embed_max_pos=seconds,
            base_height=height,
            base_width=width,
            gated_attn=self.apply_gated_attention,
            cross_attn_mod=self.cross_attention_adaln,
            audio_in_channels=self.audio_out_channels,
            audio_scale_factor=2 ** (len(audio_vae.ch_mult) - 1),
            audio_pos_embed_max_pos=self.audio_positional_embedding_max_pos[0],
            audio_sampling_rate=audio_vae.sample_rate,
            audio_hop_length=audio_vae.mel_hop_length,
            audio_gated_attn=self.apply_gated_attention,
            audio_cross_attn_mod=self.cross_attention_adaln,
            rope_theta=self.positional_embedding_theta,
            cross_attn_timestep_scale_multiplier=self.av_ca_timestep_scale_multiplier,
            use_prompt_embeddings=not self.caption_proj_before_connector,
            perturbed_attn=True,  # no key for it: what runs these files perturbs whenever asked
        )

    def connectors(self, text_states: int) -> ConnectorsArch:
        """The connectors to a text encoder with so many hidden states."""
        heads, head_dim = self.connector_num_attention_heads, self.connector_attention_head_dim
        return ConnectorsArch(
            caption_channels=self.caption_channels,
            text_proj_in_factor=text_states,
            video_connector_num_attention_heads=heads,
            video_connector_attention_head_dim=head_dim,
            video_connector_num_layers=self.connector_num_layers,
            video_connector_num_learnable_registers=self.connector_num_learnable_registers,
            audio_connector_num_attention_heads=self.audio_connector_num_attention_heads or heads,
            audio_connector_attention_head_dim=self.audio_connector_attention_head_dim or head_dim,
            audio_connector_num_layers=self.connector_num_layers,
            audio_connector_num_learnable_registers=self.connector_num_learnable_registers,
            video_gated_attn=self.connector_apply_gated_attention,
            audio_gated_attn=self.connector_apply_gated_attention,
            connector_rope_base_seq_len=self.connector_positional_embedding_max_pos[0],
            per_modality_projections=self.caption_proj_before_connector,
            video_hidden_dim=self.cross_attention_dim,
            audio_hidden_dim=self.audio_cross_attention_dim,
            proj_bias=self.caption_proj_before_connector,
        )


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
            **_same(self, AudioVAEArch),
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
        _refuse((f"{key} is {wrong[key]}, the upsampling makes {made}" for key in wrong), where)
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
            _refuse([f"input_sampling_rate is {self.input_sampling_rate}, the first generator makes {made}"], where)
        if first.final_act_fn is None:
            _refuse(["apply_final_activation of the first generator is False, only True is"], where)
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


def original_archs(config: Config, text_states: int, where: str) -> Arch:
    """What the networks of a single file are, by the `config` in its metadata.

    `text_states` is how many hidden states the text encoder has; `where` names the file in errors. Raises `SpecError`
    with what a section lacks or with the values in it that are not implemented.
    """
    section = _section(config, where, "transformer")
    transformer = _described(OriginalTransformer, section, f"{where}, transformer")
    video_vae, audio_vae = _video_vae(config, where), _audio_vae(config, where)
    arch = Arch(
        transformer.transformer(video_vae, audio_vae),
        transformer.connectors(text_states),
        video_vae,
        audio_vae,
        _vocoder(config, audio_vae, where),
        PUBLISHED_SCHEDULE,  # the section that the files have for it describes that of an older model
    )
    for name, network in vars(arch).items():
        _refuse(network.conflicts(), f"{where}, {name}")
    return arch


def _video_vae(config: Config, where: str) -> VideoVAEArch:
    vae = _described(OriginalVideoVAE, _section(config, where, "vae"), f"{where}, vae")
    encoder = _stages(vae.encoder_blocks, ENCODER, f"{where}, vae.encoder_blocks")
    decoder = _stages(vae.decoder_blocks, DECODER, f"{where}, vae.decoder_blocks")
    if any(encoder.residual):
        _refuse(["residual is True in the encoder, where the kind of block says it"], f"{where}, vae.encoder_blocks")
    if encoder.compression != decoder.compression:
        _refuse(["encoder_blocks and decoder_blocks differ in what they do to time and space"], f"{where}, vae")
    return vae.arch(encoder, decoder)


def _stages(blocks: Blocks, types: Mapping[str, str], where: str) -> Stages:
    """What `blocks` are: residual ones with one of `types` between each two."""
    known, kinds = (RESIDUAL, *types), [kind for kind, _ in blocks]
    _refuse((f"{kind!r} is not known, only {', '.join(known)} are" for kind in kinds if kind not in known), where)
    if [kind == RESIDUAL for kind in kinds] != [place % 2 == 0 for place in range(len(kinds) | 1)]:
        _refuse([f"the order is {', '.join(kinds)}, only {RESIDUAL} with one other between each two is"], where)
    levels = [_described(ResidualBlocks, options, f"{where}, {kind}") for kind, options in blocks[::2]]
    between = [_described(Resampling, options, f"{where}, {kind}") for kind, options in blocks[1::2]]
    return Stages(
        layers=tuple(level.num_layers for level in levels),
        types=tuple(types[kind] for kind in kinds[1::2]),
        multipliers=tuple(step.multiplier for step in between),
        residual=tuple(step.residual for step in between),
    )


def _audio_vae(config: Config, where: str) -> AudioVAEArch:
    params = _section(config, where, "audio_vae", "model", "params")
    stft = _section(config, where, "audio_vae", "preprocessing", "stft")
    spectra = {"sampling_rate": params.get("sampling_rate"), "hop_length": stft.get("hop_length")}
    section = _section(params, f"{where}, audio_vae", "ddconfig") | spectra
    return _described(OriginalAudioVAE, section, f"{where}, audio_vae").arch()


def _vocoder(config: Config, audio_vae: AudioVAEArch, where: str) -> VocoderArch:
    section, where = _section(config, where, "vocoder"), f"{where}, vocoder"
    inner = _section(section, where, "vocoder") if "bwe" in section else section
    generator = _described(OriginalGenerator, inner, where)
    rate = generator.sampling_rate(audio_vae.sample_rate, audio_vae.mel_hop_length, where)
    arch = generator.arch(audio_vae.mel_bins, rate)
    if inner is section:
        return arch
    where = f"{where}.bwe"
    return _described(OriginalExtension, _section(section, where, "bwe"), where).after(arch, where)


def _section(config: Config, where: str, *path: str) -> Config:
    for depth, key in enumerate(path, start=1):
        inner = config.get(key)
        if not isinstance(inner, dict):
            raise SpecError(f"{where}: the config has no section {'.'.join(path[:depth])}", HINT)
        config = inner
    return config


def _described(kind: type[N], section: Config, where: str) -> N:
    """What `section` describes; `where` names it in errors."""
    lacking = [field.name for field in fields(kind) if field.default is MISSING and section.get(field.name) is None]
    if lacking:
        raise SpecError(f"{where}: the config lacks {', '.join(lacking)}", HINT)
    return read_arch(kind, section, where)


def _same(section: NetworkArch, kind: type[NetworkArch]) -> Config:
    """The fields of `section` that are called the same in `kind`."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in asdict(section).items() if name in names}


def _refuse(problems: Iterable[str], where: str) -> None:
    """Raise `SpecError` if there are any."""
    found = "; ".join(problems)
    if found:
        raise SpecError(f"{where}: this model is not implemented: {found}", HINT)
