"""`ltx2 lora inspect`: what a LoRA adds to and for which model version it was made, by its header."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

from ltx2_cli.cli.options import Lora
from ltx2_cli.console import columns, print_out
from ltx2_cli.units import quantity
from ltx2_cli.weights.checkpoint import shape_text
from ltx2_cli.weights.lora import LoraFile, LoraPair, lora_file, model_version, open_lora, parse_lora

LAYER = re.compile(r"(blocks)\.\d+\.")
UNKNOWN = "not to be told from its header: ltx2 or ltx2.3"
LONGEST_VALUE = 80  # characters of a value in the metadata


@dataclass(frozen=True)
class LoraTargets:
    """The targets of a LoRA that differ in their layer alone."""

    name: str  # with `*` for the layer
    shape: tuple[int, int]  # (out, in)
    targets: int
    ranks: tuple[int, ...]  # each that occurs, smallest first


@dataclass(frozen=True)
class LoraInfo:
    """The header of a LoRA."""

    file: str
    bytes: int
    model_version: str | None
    pairs: int
    ranks: tuple[int, ...]
    alphas: tuple[str | float | None, ...]  # `tensor`, a number that its config states, or None
    dtypes: tuple[str, ...]
    metadata: Mapping[str, str]
    targets: tuple[LoraTargets, ...]


def lora(options: Lora) -> None:
    """Print it. Only the file's header is read."""
    info = lora_info(open_lora(lora_file(parse_lora(options.name)[0])))
    print_out(json.dumps(asdict(info), indent=2) if options.as_json else "\n".join(lora_lines(info)))


def lora_info(file: LoraFile) -> LoraInfo:
    """What the header of an open LoRA says."""
    groups: dict[tuple[str, tuple[int, int]], list[LoraPair]] = {}
    for target, pair in file.pairs.items():
        groups.setdefault((LAYER.sub(r"\1.*.", target), pair.shape), []).append(pair)
    alphas = {"tensor" if isinstance(pair.alpha, str) else pair.alpha for pair in file.pairs.values()}
    return LoraInfo(
        str(file.path),
        file.path.stat().st_size,
        model_version(file),
        len(file.pairs),
        _ranks(file.pairs.values()),
        tuple(sorted(alphas, key=str)),
        tuple(sorted({dtype for pair in file.pairs.values() for dtype in pair.dtypes})),
        file.files.metadata,
        tuple(LoraTargets(*key, len(group), _ranks(group)) for key, group in sorted(groups.items())),
    )


def _ranks(pairs: Iterable[LoraPair]) -> tuple[int, ...]:
    return tuple(sorted({pair.rank for pair in pairs}))


def lora_lines(info: LoraInfo) -> Iterator[str]:
    """Facts, then the targets."""
    alphas = " and ".join("none" if alpha is None else str(alpha) for alpha in info.alphas)
    facts = [
        ("file", info.file),
        ("size", f"{quantity(info.bytes)}, {' and '.join(info.dtypes)}"),
        ("model version", info.model_version or UNKNOWN),
        ("targets", f"{info.pairs}, each a pair of keys"),
        ("rank", _range(info.ranks)),
        ("alpha", alphas if alphas != "none" else "none: the strength alone scales it"),
    ]
    for key, value in sorted(info.metadata.items()):
        line = one_line(value)
        facts.append((key, line if len(line) <= LONGEST_VALUE else f"{line[: LONGEST_VALUE - 1]}…"))
    yield from [*columns(facts), ""]
    rows = []
    for group in info.targets:
        layers = f"{group.targets} layers" if "*" in group.name else ""
        rows.append((group.name, shape_text(group.shape), f"rank {_range(group.ranks)}", layers))
    yield from columns(rows)


def _range(ranks: tuple[int, ...]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"


def one_line(value: object) -> str:
    """A value without its line breaks."""
    return " ".join((", ".join(map(str, value)) if isinstance(value, list) else str(value)).split())
