"""The layout of the published single files: their tensors' names, and the values in the config of their metadata.

The header of a file shows sizes: its tensors are compared with those that the networks declare. The values that no
shape shows lie beside this module, in `native.ltx2.json` for one, under the files' own keys. Older files lack newer
keys: one that is left out has the published value.
"""

import json
import re
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ltx2_cli.errors import UsageError
from ltx2_cli.models.config import Config
from ltx2_cli.weights.checkpoint import AGAIN, Renaming

DEEPEST = 5  # sections within sections
SECTIONS = ("transformer", "vae", "audio_vae", "vocoder")
# keys whose value a tensor's shape shows, or that change nothing
SHOWN = re.compile(
    r"""(?x) attention_head_dim | cross_attention_dim | caption_channels | num_layers | ff_bias | audio_ff_bias
    | audio_attention_head_dim | audio_cross_attention_dim | audio_out_channels | in_channels | out_channels
    | latent_channels | (encoder|decoder)_base_channels | connector_num_layers | connector_num_learnable_registers
    | (connector_)?apply_gated_attention | cross_attention_adaln | caption_proj_before_connector
    | connector_learnable_registers_std | dropout | norm_num_groups | num_embeds_ada_norm
    | ch | out_ch | ch_mult | num_res_blocks | z_channels | resolution
    | upsample_initial_channel | upsample_kernel_sizes | resblock_kernel_sizes"""
)

STATISTICS = "latents_mean per_channel_statistics.mean-of-means latents_std per_channel_statistics.std-of-means"
NORMS = "norm_q q_norm norm_k k_norm"


def _renaming(prefix: str, fragments: str) -> Renaming:
    """A table of fragments, ours and theirs in turn."""
    words = fragments.split()
    return Renaming(prefix, tuple(zip(words[::2], words[1::2], strict=True)))


RENAMINGS = {
    "transformer": _renaming(
        "model.diffusion_model.",
        f"""{NORMS}
        proj_in patchify_proj audio_proj_in audio_patchify_proj
        time_embed adaln_single audio_time_embed audio_adaln_single
        prompt_adaln prompt_adaln_single audio_prompt_adaln audio_prompt_adaln_single
        av_cross_attn_video_scale_shift av_ca_video_scale_shift_adaln_single
        av_cross_attn_audio_scale_shift av_ca_audio_scale_shift_adaln_single
        av_cross_attn_video_a2v_gate av_ca_a2v_gate_adaln_single
        av_cross_attn_audio_v2a_gate av_ca_v2a_gate_adaln_single
        video_a2v_cross_attn_scale_shift_table scale_shift_table_a2v_ca_video
        audio_a2v_cross_attn_scale_shift_table scale_shift_table_a2v_ca_audio""",
    ),
    "connectors": _renaming(
        "",
        f"""{NORMS} transformer_blocks transformer_1d_blocks
        video_connector model.diffusion_model.video_embeddings_connector
        audio_connector model.diffusion_model.audio_embeddings_connector
        text_proj_in text_embedding_projection.aggregate_embed
        video_text_proj_in text_embedding_projection.video_aggregate_embed
        audio_text_proj_in text_embedding_projection.audio_aggregate_embed""",
    ),
    "audio_vae": _renaming("audio_vae.", STATISTICS),
    "vocoder": _renaming(
        "vocoder.",
        """conv_in conv_pre conv_out conv_post upsamplers ups resnets resblocks
        act_out act_post downsample downsample.lowpass""",
    ),
}


def video_vae_renaming(encoder_stages: int, decoder_stages: int) -> Renaming:
    """The video autoencoder's names: stages and what lies between them are counted through in a single file."""
    down, up, last = "encoder.down_blocks", "decoder.up_blocks", 2 * encoder_stages
    stages = [
        *(f"{down}.{i}.resnets {down}.{2 * i}.res_blocks" for i in range(encoder_stages)),
        *(f"{down}.{i}.downsamplers.0 {down}.{2 * i + 1}" for i in range(encoder_stages)),
        f"encoder.mid_block.resnets {down}.{last}.res_blocks decoder.mid_block.resnets {up}.0.res_blocks",
        *(f"{up}.{i}.upsamplers.0 {up}.{2 * i + 1}" for i in range(decoder_stages)),
        *(f"{up}.{i}.resnets {up}.{2 * i + 2}.res_blocks" for i in range(decoder_stages)),
    ]
    return _renaming("vae.", " ".join([STATISTICS, *stages]))


def config_problems(config: Config, version: str, where: str) -> Iterator[UsageError]:
    """What `config` states that this model version does not mean; `where` names the file."""
    for section in SECTIONS:
        if not isinstance(config.get(section), dict):
            yield UsageError(f"{where}: the config has no section {section}", AGAIN)
    stated = {section: config.get(section) for section in SECTIONS}
    published = dict(_flat(json.loads(Path(__file__).with_name(f"native.{version}.json").read_text(encoding="utf-8"))))
    if problems := [problem for key, value in _flat(stated) for problem in _problem(key, value, published)]:
        yield UsageError(f"{where}: this {version} model is not implemented: {'; '.join(problems)}", AGAIN)


def _problem(key: str, value: Any, published: Config) -> Iterator[str]:
    if key in published:
        if value not in (None, published[key]):
            yield f"{key} is {reprlib.repr(value)}, only {published[key]!r} is"
    elif value and not SHOWN.fullmatch(key.rpartition(".")[2]) and not key.startswith("audio_vae.preprocessing."):
        yield f"{key} is {reprlib.repr(value)}, which is not known"


def _flat(config: Config, path: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted key, without bookkeeping; lists in a list by their place. Options that are off do not count."""
    for key, value in config.items():
        if isinstance(value, dict) and path.count(".") < DEEPEST:
            yield from _flat(value, f"{path}{key}.")
        elif isinstance(value, list) and any(isinstance(inner, list) for inner in value):
            yield from _flat({str(number): inner for number, inner in enumerate(value)}, f"{path}{key}.")
        elif not key.startswith("_"):
            yield f"{path}{key}", list(map(_without_off, value)) if isinstance(value, list) else value


def _without_off(value: Any) -> Any:
    return {key: inner for key, inner in value.items() if inner} if isinstance(value, dict) else value
