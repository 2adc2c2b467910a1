"""LoRAs: find the file of `--lora`, parse its header into pairs for each target, and read their arrays on request."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ltx2_cli.artifacts.files import user_path
from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.request.profiles import SAFETENSORS
from ltx2_cli.request.spelling import typed
from ltx2_cli.weights.checkpoint import TensorFiles, abbreviate, collect, count_and_list, raise_all, read_json
from ltx2_cli.weights.hub import Download, cached_files, list_downloads, locate_or_download
from ltx2_cli.weights.tensors import DTYPES, FLOATS

LEAVE_OUT = "name another LoRA, or none"
TAKES = "a LoRA is a FILE, a FOLDER or REPO[/FILE], with a strength behind it or without: FILE:0.8"
LORA_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(@.+)?")
MAX_FLOAT32 = 3e38
BF16_MAGNITUDE = np.uint16(0x7FFF)  # all bits but the sign, which is the first: larger magnitudes have larger ones
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
VERSION_MARKS = {
    "ltx2": re.compile(r"(audio_)?caption_projection|aggregate_embed|text_proj_in"),
    "ltx2.3": re.compile(
        r"to_gate_logits|(audio_)?prompt_adaln(_single)?|(video|audio)_(aggregate_embed|text_proj_in)"
    ),
}
Keys = dict[str, list[str]]  # of a target: the names of its factors `a` and `b`, and of its `alpha`
MODULATION = re.compile(r"(audio_)?(adaln_single|time_embed)")
MODULATION_ROWS = {6: "ltx2", 9: "ltx2.3"}  # that one embedding of the noise level becomes
VERSION = re.compile(r"(?:^|ltx[-_ ]?)2\.([035])", re.IGNORECASE)
LORA_VERSIONS = {"0": "ltx2", "3": "ltx2.3", "5": "ltx2.5"}  # the last two have the same linear layers
VERSION_KEYS = ("model_version", "ss_base_model_version", "modelspec.architecture")


@dataclass(frozen=True)
class LoraPair:
    """The tensors of one target in a file: `a` [rank, in] and `b` [out, rank]."""

    a: str
    b: str
    alpha: str | float | None  # the tensor that holds it, or the number that the adapter's config states
    shape: tuple[int, int]  # of b @ a: (out, in)
    rank: int
    dtypes: tuple[str, str]


class LoraFactors(NamedTuple):
    """The factors of a low-rank matrix b · diag(scales) · a, as they are stored: arrays, or places of arrays."""

    a: Any  # [rank, in]
    b: Any  # [out, rank]
    scales: Any  # float32 [rank]


@dataclass(frozen=True, eq=False)
class LoraFile:
    """A LoRA file with its header read."""

    path: Path
    files: TensorFiles
    pairs: Mapping[str, LoraPair]  # by target, as the file calls it

    def read(self, target: str, strength: float) -> LoraFactors:
        """The factors of a target. Their scale is strength · alpha / rank, or the strength without an alpha. Raises
        `RunError` where they are not finite."""
        pair = self.pairs[target]
        a, b, alpha = self._array(pair.a), self._array(pair.b), pair.alpha
        number = float(self._array(alpha).item()) if isinstance(alpha, str) else alpha
        scale = np.float32(strength * (1.0 if number is None else number / pair.rank))
        if not np.isfinite([largest(a), largest(b) * scale]).all():
            again = f"download it again, or {LEAVE_OUT}"
            raise RunError(f"{self.path} is damaged: {pair.a} and its twin are not finite", again)
        return LoraFactors(a, b, np.full(pair.rank, scale))

    def _array(self, name: str) -> np.ndarray:
        stored = np.empty(self.files[name].shape, self.files[name].stored_dtype)
        self.files.read_into(name, 0, stored)
        return stored.astype(_factor_dtype(self.files[name].dtype), copy=False)


@dataclass(frozen=True)
class LoraDelta:
    """The sum of LoRAs for one tensor W (out, in), as on disk: W + b · diag(scales) · a."""

    parts: tuple[tuple[LoraFile, str, float], ...]  # files, with a target and a strength

    @property
    def rank(self) -> int:
        """The sum of the files' ranks."""
        return sum(lora.pairs[target].rank for lora, target, _ in self.parts)

    @property
    def dtype(self) -> np.dtype:
        """The type of its factors: that of the files, or float32 if they have several."""
        stored = {dtype for lora, target, _ in self.parts for dtype in lora.pairs[target].dtypes}
        return _factor_dtype(*stored)

    def read(self) -> LoraFactors:
        """The factors of all files, concatenated along the rank."""
        a, b, scales = zip(*(lora.read(target, strength) for lora, target, strength in self.parts), strict=True)
        wide = partial(np.ndarray.astype, dtype=self.dtype, copy=False)
        return LoraFactors(
            np.concatenate([*map(wide, a)]), np.concatenate([*map(wide, b)], axis=1), np.concatenate(scales)
        )


def _factor_dtype(*stored: str) -> np.dtype:
    """The type in which factors of types on disk are sent: theirs, or float32 for several or float64."""
    return np.dtype(DTYPES[stored[0]] if len(stored) == 1 and stored[0] != "F64" else np.float32)


def largest(x: np.ndarray) -> np.float32:
    """The largest magnitude of numbers; not finite if one is not."""
    if x.dtype == ml_dtypes.bfloat16:  # whose functions are slow, and run in one thread at a time
        positive, negative = x.view(np.int16).max(), x.view(np.uint16).max() & BF16_MAGNITUDE
        return np.maximum(positive, negative).astype(np.uint16).view(x.dtype).astype(np.float32)
    return np.abs(x).max().astype(np.float32)


def open_lora(path: Path) -> LoraFile:
    """Open the LoRA of a .safetensors file. Raises `UsageError` with all parts of its header that cannot be applied."""
    if path.suffix != SAFETENSORS:
        raise UsageError(f"{path} is not a {SAFETENSORS} file", "a LoRA is a FILE, a FOLDER or REPO[/FILE]")
    try:
        files = TensorFiles(path)
    except UsageError as error:
        raise UsageError(str(error), f"download it again, or {LEAVE_OUT}") from error
    faults: defaultdict[str, list[str]] = defaultdict(list)
    keys = _sort_out(files, faults)
    if not keys:
        raise UsageError(f"{path} holds no LoRA: none of its {len(files)} keys is a low-rank factor", LEAVE_OUT)
    config, pairs = _adapter_config(path, files), {}
    for target, roles in keys.items():
        match _pair(target, roles, files, config):
            case LoraPair() as pair:
                pairs[target] = pair
            case str(fault):
                faults[fault].append(target)
    if findings := [*count_and_list(faults), *_unknown_options(config)]:
        raise UsageError(f"{path} is a LoRA of a kind that is not implemented: {'; '.join(findings)}", LEAVE_OUT)
    return LoraFile(path, files, pairs)


def _sort_out(names: Iterable[str], others: defaultdict[str, list[str]]) -> dict[str, Keys]:
    """Sort keys by target; all others go by their kind into `others`."""
    factors: dict[str, Keys] = {}
    alphas = []
    for name in names:
        if match := FACTOR.fullmatch(name):
            factors.setdefault(match[1], {"a": [], "b": [], "alpha": []})["a" if match[2] else "b"].append(name)
        elif name.endswith(ALPHA):
            alphas.append(name)
        else:
            others[next(kind for kind, pattern in NO_FACTORS.items() if pattern.fullmatch(name))].append(name)
    for name in alphas:
        target = name.removesuffix(ALPHA)
        (factors[target]["alpha"] if target in factors else others["of an alpha without A and B"]).append(name)
    return factors


def _pair(target: str, keys: Keys, files: TensorFiles, config: Mapping[str, Any]) -> LoraPair | str:
    """The pair of these keys, or a sentence on the problem with them."""
    if len(keys["a"]) != 1 or len(keys["b"]) != 1:
        return "without one A and one B"
    a, b, *alphas = [files[name] for names in keys.values() for name in names]
    if len(a.shape) != 2 or len(b.shape) != 2:
        return "whose A or B is no matrix"
    if a.shape[0] != b.shape[1] or not a.shape[0]:
        return "whose A and B have no rank in common"
    if any(math.prod(alpha.shape) != 1 for alpha in alphas):
        return "whose alpha is not one number"
    if unread := {tensor.dtype for tensor in (a, b, *alphas)} - FLOATS:
        return f"of type {' and '.join(sorted(unread))}, which is not read"
    stated = config.get(f"{target.partition('.')[0]}.lora_alpha", config.get("lora_alpha"))
    alpha, shape = keys["alpha"][0] if alphas else stated, (b.shape[0], a.shape[1])
    return LoraPair(keys["a"][0], keys["b"][0], alpha, shape, a.shape[0], (a.dtype, b.dtype))


def _adapter_config(path: Path, files: TensorFiles) -> dict[str, Any]:
    """The adapter's config: peft's in the file beside it, or diffusers' in its metadata."""
    beside = path.with_name(PEFT_CONFIG)
    if path.name == PEFT_FILE and beside.exists():
        return read_json(beside)
    if (config := files.config(absent="{}", key=DIFFUSERS_CONFIG)) is None:
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
    """By the targets, which do not tell `ltx2.3` from `ltx2.5`, else by the metadata; None if unknown."""
    found = version_of({target: pair.shape for target, pair in lora.pairs.items()})
    stated = {match[1] for key in VERSION_KEYS if (match := VERSION.search(lora.files.metadata.get(key, "")))}
    version = LORA_VERSIONS[stated.pop()] if len(stated) == 1 else None
    return version if found is None or version == "ltx2.5" else found


def stated_version(lora: LoraFile) -> str | None:
    """The model version that the metadata or the name of a file states; None: neither does."""
    texts = [lora.files.metadata.get(key, "") for key in VERSION_KEYS]
    found = next(filter(None, map(VERSION.search, [*texts, lora.path.name])), None)
    return LORA_VERSIONS[found[1]] if found else None


def version_of(shapes: Mapping[str, Sequence[int]]) -> str | None:
    """`ltx2` or `ltx2.3`, by the names and shapes (out, in) of linear layers; None if unknown."""
    versions = set()
    for name, shape in shapes.items():
        elements = name.split(".")
        if elements[-1] == "linear" and any(map(MODULATION.fullmatch, elements)):
            versions.add(MODULATION_ROWS.get(shape[0] // shape[1]))
        else:
            marked = (
                version for element in elements for version, mark in VERSION_MARKS.items() if mark.fullmatch(element)
            )
            versions.add(next(marked, None))
    versions.discard(None)
    return versions.pop() if len(versions) == 1 else None


def parse_lora(text: str) -> tuple[str, float]:
    """Split `NAME:0.8` into NAME and 0.8; without a strength, 1. A file whose name has the colon is found first."""
    name, colon, strength = text.rpartition(":")
    if not colon or user_path(text).exists():
        return text, 1.0
    if not name:
        raise UsageError(f"the LoRA {text} names no file", TAKES)
    try:
        number = float(strength)
    except ValueError:
        number = math.nan
    if not abs(number) <= MAX_FLOAT32:
        raise UsageError(f"{text}: the strength `{strength}` is not a finite number", typed("lora", [f"{name}:0.8"]))
    return name, number


def lora_file(name: str) -> Path:
    """The file of a path or `REPO/FILE[@REVISION]`, or the only LoRA of a folder or `REPO[@REVISION]`. From a
    repository, downloads that file and peft's config, which has alpha. Raises `UsageError` for none or several."""
    path = user_path(name)
    if path.is_dir():
        files = sorted(path.glob(f"*{SAFETENSORS}"))
        return path / _only([file.name for file in files if any(map(FACTOR.fullmatch, TensorFiles(file)))], name)
    if path.exists():
        return path
    on_hub = _on_hub(name)
    path = locate_or_download(on_hub, [])
    if path.name == PEFT_FILE:
        locate_or_download(on_hub.replace(PEFT_FILE, PEFT_CONFIG), [])
    return path


def check_address(name: str) -> None:
    """Raise `UsageError` for a LoRA that does not exist and is not spelled like one of a repository."""
    is_file = name.endswith(SAFETENSORS)
    if not user_path(name).exists() and (name.startswith(("/", ".", "~")) or name.count("/") < 1 + is_file):
        raise UsageError(f"there is no file {name}", TAKES)


def check_local_loras(texts: Sequence[str]) -> None:
    """Raise `UsageError` for local LoRAs that are absent or refused, and for malformed names of repositories."""

    def check(text: str) -> None:
        name, _ = parse_lora(text)
        check_address(name)
        if user_path(name).exists():
            open_lora(lora_file(name))

    raise_all(collect({str(number): partial(check, text) for number, text in enumerate(texts)})[1])


def lora_downloads(name: str) -> list[Download]:
    """The files that `lora_file` would download; none for a path. Raises `UsageError` as `lora_file`."""
    return [] if user_path(name).exists() else list_downloads(_on_hub(name), [])


def _on_hub(name: str) -> str:
    """`REPO/FILE[@REVISION]` for a repository: its only top-level LoRA, since other files must be downloaded to be
    recognised."""
    check_address(name)
    if not LORA_REPOSITORY.fullmatch(name):
        return name
    repository, at, revision = name.partition("@")
    listed = list_downloads(name, [f"*{SAFETENSORS}"]) or cached_files(name, [f"*{SAFETENSORS}"])
    only = _only(sorted(file.name for file in listed if "/" not in file.name), repository)
    return f"{repository}/{only}{at}{revision}"


def _only(names: Sequence[str], place: str) -> str:
    if not names:
        raise UsageError(f"{place} holds no LoRA", TAKES)
    likely, *others = sorted(names, key=lambda name: ("lora" not in name.lower(), name))
    if others:
        listed = abbreviate([likely, *others])
        raise UsageError(
            f"{place} holds {len(names)} files: {listed}", f"name one: {typed('lora', [f'{place}/{likely}'])}"
        )
    return likely
