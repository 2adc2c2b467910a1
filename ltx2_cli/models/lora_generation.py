"""For which generation of the model a LoRA was made, by its header. Facts about names only: no network is built."""

import re
from collections.abc import Mapping, Sequence

from ltx2_cli.weights.lora import LoraFile

# Elements of names that one generation has and the other has not, whichever way a file names them.
MARKS = {
    "ltx2": ("caption_projection", "audio_caption_projection", "aggregate_embed", "text_proj_in"),
    "ltx2.3": (
        "to_gate_logits",
        *("prompt_adaln", "audio_prompt_adaln", "prompt_adaln_single", "audio_prompt_adaln_single"),
        *("video_aggregate_embed", "audio_aggregate_embed", "video_text_proj_in", "audio_text_proj_in"),
    ),
}
GENERATIONS = {element: generation for generation, elements in MARKS.items() for element in elements}
MODULATIONS = frozenset(("adaln_single", "audio_adaln_single", "time_embed", "audio_time_embed"))
MODULATION_ROWS = {6: "ltx2", 9: "ltx2.3"}  # that one embedding of the noise level becomes
VERSION = re.compile(r"(?:^|ltx[-_ ]?)2\.([03])", re.IGNORECASE)
VERSIONS = {"0": "ltx2", "3": "ltx2.3"}
VERSION_KEYS = ("model_version", "ss_base_model_version", "modelspec.architecture")


def generation(lora: LoraFile) -> str | None:
    """`ltx2` or `ltx2.3`, by the targets and, where they say nothing, by the metadata; None where nothing tells."""
    shapes = {target: pair.shape for target, pair in lora.pairs.items()}
    return generation_of(shapes) or _stated(lora.files.metadata())


def generation_of(shapes: Mapping[str, Sequence[int]]) -> str | None:
    """`ltx2` or `ltx2.3`, by the names and shapes (out, in) of linear layers; None where they do not tell."""
    told = {mark for name, shape in shapes.items() if (mark := _mark(name.split("."), shape))}
    return told.pop() if len(told) == 1 else None


def _mark(elements: Sequence[str], shape: Sequence[int]) -> str | None:
    if elements[-1] == "linear" and not MODULATIONS.isdisjoint(elements):
        return MODULATION_ROWS.get(shape[0] // shape[1])
    return next((GENERATIONS[element] for element in elements if element in GENERATIONS), None)


def _stated(metadata: Mapping[str, str]) -> str | None:
    told = {match[1] for key in VERSION_KEYS if (match := VERSION.search(metadata.get(key, "")))}
    return VERSIONS[told.pop()] if len(told) == 1 else None
