"""The config in a single file's metadata, compared with the published one of its model version.

The header of the file shows sizes: its tensors are compared with those that the networks declare. The values that no
shape shows lie beside this module, in `ltx2.json` for one, under the files' own keys. Older files lack newer keys: one
that is left out has the published value.
"""

import json
import re
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ltx2_cli.errors import UsageError
from ltx2_cli.models.config import Config
from ltx2_cli.weights.checkpoint import AGAIN

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


def config_problems(config: Config, version: str, where: str) -> Iterator[UsageError]:
    """What `config` states that this model version does not mean; `where` names the file."""
    for section in SECTIONS:
        if not isinstance(config.get(section), dict):
            yield UsageError(f"{where}: the config has no section {section}", AGAIN)
    stated = {section: config.get(section) for section in SECTIONS}
    published = dict(_flat(json.loads(Path(__file__).with_name(f"{version}.json").read_text(encoding="utf-8"))))
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
