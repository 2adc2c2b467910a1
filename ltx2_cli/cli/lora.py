"""`ltx2 lora inspect`: what a LoRA adds to and for which model version it was made, by its header."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ltx2_cli.cli.options import Lora
from ltx2_cli.console import columns, print_out
from ltx2_cli.units import quantity
from ltx2_cli.weights.checkpoint import shape_text
from ltx2_cli.weights.lora import LoraFile, LoraPair, lora_file, model_version, open_lora, parse_lora

LAYER = re.compile(r"(blocks)\.\d+\.")
UNKNOWN = "not to be told from its header: ltx2 or ltx2.3"
LONGEST_VALUE = 80  # characters of a value in the metadata


def lora(options: Lora) -> None:
    """Print it. Only the file's header is read."""
    facts = lora_facts(open_lora(lora_file(parse_lora(options.name)[0])))
    print_out(json.dumps(facts, indent=2) if options.as_json else "\n".join(lora_lines(facts)))


def lora_facts(file: LoraFile) -> dict[str, Any]:
    """What the header of a LoRA says. Targets that differ in their layer alone are one, with `*` for the layer."""
    pairs, groups = file.pairs.values(), dict[tuple[str, tuple[int, int]], list[LoraPair]]()
    for target, pair in file.pairs.items():
        groups.setdefault((LAYER.sub(r"\1.*.", target), pair.shape), []).append(pair)
    return {
        "file": str(file.path),
        "bytes": file.path.stat().st_size,
        "model_version": model_version(file),
        "pairs": len(pairs),
        "ranks": _ranks(pairs),
        # each is `tensor`, a number that the config states, or None
        "alphas": sorted({"tensor" if isinstance(pair.alpha, str) else pair.alpha for pair in pairs}, key=str),
        "dtypes": sorted({dtype for pair in pairs for dtype in pair.dtypes}),
        "metadata": file.files.metadata,
        "targets": [
            {"name": name, "shape": shape, "targets": len(group), "ranks": _ranks(group)}
            for (name, shape), group in sorted(groups.items())
        ],
    }


def _ranks(pairs: Iterable[LoraPair]) -> list[int]:
    return sorted({pair.rank for pair in pairs})


def lora_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Facts, then the targets."""
    alphas = " and ".join("none" if alpha is None else str(alpha) for alpha in facts["alphas"])
    rows = [
        ("file", facts["file"]),
        ("size", f"{quantity(facts['bytes'])}, {' and '.join(facts['dtypes'])}"),
        ("model version", facts["model_version"] or UNKNOWN),
        ("targets", f"{facts['pairs']}, each a pair of keys"),
        ("rank", _range(facts["ranks"])),
        ("alpha", alphas if alphas != "none" else "none: the strength alone scales it"),
    ]
    for key, value in sorted(facts["metadata"].items()):
        line = " ".join(value.split())
        rows.append((key, line if len(line) <= LONGEST_VALUE else f"{line[: LONGEST_VALUE - 1]}…"))
    yield from [*columns(rows), ""]
    targets = []
    for group in facts["targets"]:
        layers = f"{group['targets']} layers" if "*" in group["name"] else ""
        targets.append((group["name"], shape_text(group["shape"]), f"rank {_range(group['ranks'])}", layers))
    yield from columns(targets)


def _range(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
