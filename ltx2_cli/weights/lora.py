"""LoRA files: low-rank additions to weights, by their headers; their model version; their arrays on request."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.weights.checkpoint import DTYPES, EIGHT_BITS, TensorFiles, count_and_list, read_json

FLOATS = DTYPES.keys() - EIGHT_BITS.keys()
SUFFIX = ".safetensors"
LEAVE_OUT = "name another LoRA, or none"
# A factor's key; what may stand before `weight` is the name that peft gave the adapter.
FACTOR = re.compile(r"(.+)\.(?:(lora_A|lora_down|lora\.down)|lora_B|lora_up|lora\.up)(?:\.[^.]+)?\.weight")
ALPHA = ".alpha"
NO_FACTORS = {
    "of DoRA": re.compile(r".*(dora_scale|lora_magnitude_vector).*"),
    "of a bias": re.compile(r".*\.lora.*\.bias"),
    "of a whole difference": re.compile(r".*\.diff(_\w+)?"),
    "of an embedding": re.compile(r".*lora_embedding_.*"),
    "of LoHa or LoKr": re.compile(r".*\.(hada|lokr)_.*"),
    "of no known kind": re.compile(r".*"),
}
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
DIFFUSERS_CONFIG = "lora_adapter_metadata"  # the same in a file's metadata, its keys behind their network's name
UNKNOWN_OPTIONS = ("use_dora", "use_rslora", "lora_bias", "alpha_pattern", "kasa_config")
CHANGING_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # ways to begin that subtract from the weights
# Elements of names that one model version has and the other has not, whichever way a file names them.
MARKS = {
    "ltx2": ("caption_projection", "audio_caption_projection", "aggregate_embed", "text_proj_in"),
    "ltx2.3": (
        "to_gate_logits",
        *("prompt_adaln", "audio_prompt_adaln", "prompt_adaln_single", "audio_prompt_adaln_single"),
        *("video_aggregate_embed", "audio_aggregate_embed", "video_text_proj_in", "audio_text_proj_in"),
    ),
}
MODEL_VERSIONS = {element: model_version for model_version, elements in MARKS.items() for element in elements}
MODULATIONS = frozenset(("adaln_single", "audio_adaln_single", "time_embed", "audio_time_embed"))
MODULATION_ROWS = {6: "ltx2", 9: "ltx2.3"}  # that one embedding of the noise level becomes
VERSION = re.compile(r"(?:^|ltx[-_ ]?)2\.([03])", re.IGNORECASE)
VERSIONS = {"0": "ltx2", "3": "ltx2.3"}
VERSION_KEYS = ("model_version", "ss_base_model_version", "modelspec.architecture")


@dataclass(frozen=True)
class LoraPair:
    """The tensors that a file has for one target: `a` [rank, in] and `b` [out, rank]."""

    a: str
    b: str
    alpha: str | float | None  # the tensor that holds it, or the number that the adapter's config states
    shape: tuple[int, int]  # of b @ a: (out, in)
    rank: int
    dtypes: tuple[str, str]


@dataclass(frozen=True, eq=False)
class LoraFile:
    """A LoRA of which only the header is read."""

    path: Path
    files: TensorFiles
    pairs: Mapping[str, LoraPair]  # by target, as the file calls it


@dataclass(frozen=True)
class LoraTerm:
    """The term that one file adds to one tensor."""

    lora: LoraFile
    pair: LoraPair
    strength: float

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """float32 a [rank, in], and b [out, rank] times strength · alpha / rank, or times strength without an alpha.
        Raises `RunError` where they are not finite."""
        a, b = self._array(self.pair.a), self._array(self.pair.b)
        b *= np.float32(self.strength * self._factor())
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            again = f"download it again, or {LEAVE_OUT}"
            raise RunError(f"{self.lora.path} is damaged: {self.pair.a} and its twin are not finite", again)
        return a, b

    def _factor(self) -> float:
        match self.pair.alpha:
            case None:
                return 1.0
            case str(name):
                return float(self._array(name).item()) / self.pair.rank
            case alpha:
                return alpha / self.pair.rank

    def _array(self, name: str) -> np.ndarray:
        whole = (slice(None),) * len(self.lora.files[name].shape)
        return np.array(self.lora.files.read(name, whole), np.float32)


@dataclass(frozen=True)
class LoraDelta:
    """The sum that files add to one tensor W (out, in), as on disk: W + b @ a."""

    parts: tuple[LoraTerm, ...]

    @property
    def rank(self) -> int:
        """The sum of the files' ranks."""
        return sum(part.pair.rank for part in self.parts)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """float32 a [rank, in] and b [out, rank], those of all files concatenated along the rank."""
        a, b = zip(*(part.read() for part in self.parts), strict=True)
        return np.concatenate(a), np.concatenate(b, axis=1)


def open_lora(path: Path) -> LoraFile:
    """The LoRA in a .safetensors file; raises `UsageError` with everything in its header that cannot be applied."""
    if path.suffix != SUFFIX:
        raise UsageError(f"{path} is not a {SUFFIX} file", "--lora takes a FILE, a FOLDER or REPO[/FILE]")
    try:
        files = TensorFiles(path.parent, (path.stem,))
    except UsageError as error:
        raise UsageError(str(error), f"download it again, or {LEAVE_OUT}") from error
    factors, faults = _sort_out(files)
    if not factors:
        raise UsageError(f"{path} holds no LoRA: none of its {len(files)} keys is a low-rank factor", LEAVE_OUT)
    for target, keys in factors.items():
        if fault := _fault(keys, files):
            faults[fault].append(target)
    config = _adapter_config(path, files)
    findings = [finding for kind, names in faults.items() for finding in count_and_list(kind, names)]
    findings += _unknown_options(config)
    if findings:
        raise UsageError(f"{path} is a LoRA of a kind that is not implemented: {'; '.join(findings)}", LEAVE_OUT)
    return LoraFile(path, files, {target: _pair(target, keys, files, config) for target, keys in factors.items()})


def holds_lora(path: Path) -> bool:
    """Whether a .safetensors file has any low-rank factor."""
    return any(FACTOR.fullmatch(name) for name in TensorFiles(path.parent, (path.stem,)))


@dataclass(frozen=True)
class _Keys:
    """The keys that name one target."""

    a: list[str] = field(default_factory=list)
    b: list[str] = field(default_factory=list)
    alpha: list[str] = field(default_factory=list)


def _sort_out(names: Iterable[str]) -> tuple[dict[str, _Keys], defaultdict[str, list[str]]]:
    """The keys of low-rank factors and their alphas by target, and all others by their kind."""
    factors: defaultdict[str, _Keys] = defaultdict(_Keys)
    others: defaultdict[str, list[str]] = defaultdict(list)
    alphas = []
    for name in names:
        if match := FACTOR.fullmatch(name):
            (factors[match[1]].a if match[2] else factors[match[1]].b).append(name)
        elif name.endswith(ALPHA):
            alphas.append(name)
        else:
            others[next(kind for kind, pattern in NO_FACTORS.items() if pattern.fullmatch(name))].append(name)
    for name in alphas:
        keys = factors.get(name.removesuffix(ALPHA))
        (keys.alpha if keys else others["of an alpha without A and B"]).append(name)
    return factors, others


def _fault(keys: _Keys, files: TensorFiles) -> str | None:
    if len(keys.a) != 1 or len(keys.b) != 1:
        return "without one A and one B"
    tensors = a, b, *alphas = [files[name] for name in (*keys.a, *keys.b, *keys.alpha)]
    if len(a.shape) != 2 or len(b.shape) != 2:
        return "whose A or B is no matrix"
    if a.shape[0] != b.shape[1] or not a.shape[0]:
        return "whose A and B have no rank in common"
    if any(math.prod(alpha.shape) != 1 for alpha in alphas):
        return "whose alpha is not one number"
    if unread := {tensor.dtype for tensor in tensors} - FLOATS:
        return f"of type {' and '.join(sorted(unread))}, which is not read"
    return None


def _pair(target: str, keys: _Keys, files: TensorFiles, config: Mapping[str, Any]) -> LoraPair:
    a, b = files[keys.a[0]], files[keys.b[0]]
    network = target.partition(".")[0]
    stated = config.get(f"{network}.lora_alpha", config.get("lora_alpha"))
    alpha = keys.alpha[0] if keys.alpha else stated
    return LoraPair(keys.a[0], keys.b[0], alpha, (b.shape[0], a.shape[1]), a.shape[0], (a.dtype, b.dtype))


def _adapter_config(path: Path, files: TensorFiles) -> dict[str, Any]:
    """The adapter's config: peft's in the file beside it, or diffusers' in its metadata."""
    beside = path.with_name(PEFT_CONFIG)
    if path.name == PEFT_FILE and beside.exists():
        return read_json(beside)
    try:
        config = json.loads(files.metadata().get(DIFFUSERS_CONFIG, "{}"))
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise UsageError(f"the {DIFFUSERS_CONFIG} of {path} is not a JSON object", LEAVE_OUT)
    return config


def _unknown_options(config: Mapping[str, Any]) -> Iterator[str]:
    """The options of an adapter that are not implemented."""
    for name, value in config.items():
        option = name.rpartition(".")[2]
        number = isinstance(value, int | float) and math.isfinite(value)
        changes_base = option == "init_lora_weights" and str(value).lower().startswith(CHANGING_THE_BASE)
        if (option in UNKNOWN_OPTIONS and value) or (option == "lora_alpha" and not number) or changes_base:
            yield f"the option {name}: {value}"


def model_version(lora: LoraFile) -> str | None:
    """`ltx2` or `ltx2.3`, by the targets and, where they say nothing, by the metadata; None where nothing tells."""
    shapes = {target: pair.shape for target, pair in lora.pairs.items()}
    return version_of(shapes) or _stated_version(lora.files.metadata())


def version_of(shapes: Mapping[str, Sequence[int]]) -> str | None:
    """`ltx2` or `ltx2.3`, by the names and shapes (out, in) of linear layers; None where they do not tell."""
    told = {mark for name, shape in shapes.items() if (mark := _mark(name.split("."), shape))}
    return told.pop() if len(told) == 1 else None


def _mark(elements: Sequence[str], shape: Sequence[int]) -> str | None:
    if elements[-1] == "linear" and not MODULATIONS.isdisjoint(elements):
        return MODULATION_ROWS.get(shape[0] // shape[1])
    return next((MODEL_VERSIONS[element] for element in elements if element in MODEL_VERSIONS), None)


def _stated_version(metadata: Mapping[str, str]) -> str | None:
    told = {match[1] for key in VERSION_KEYS if (match := VERSION.search(metadata.get(key, "")))}
    return VERSIONS[told.pop()] if len(told) == 1 else None
