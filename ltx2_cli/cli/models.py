"""`ltx2 models`: what is published, and what of it is here. `ltx2 lora inspect`: what a LoRA adds to and for which
model version it was made, by its header."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from huggingface_hub import constants

from ltx2_cli.cli.options import Lora, Models
from ltx2_cli.console import columns, fitted_columns, print_out, reporter
from ltx2_cli.request.layers import read_file
from ltx2_cli.request.profiles import GEMMA, configs, profile_names
from ltx2_cli.units import quantity
from ltx2_cli.weights.checkpoint import shape_text
from ltx2_cli.weights.hub import DEMO_FOLDER, cached_files
from ltx2_cli.weights.lora import LoraFile, LoraPair, lora_file, model_version, open_lora, parse_lora
from ltx2_cli.weights.published import CATALOG, EMBEDDED, MODEL, TEXT_ENCODER, CatalogEntry

HEADINGS = {MODEL: "models, for --model", TEXT_ENCODER: "text encoders, for --text-encoder"}
COLUMNS = ("model version", "recipe", "format", "size", "in the cache", "to download")
RIGHT = (4, 6)  # columns of numbers, counted with the name before them


def models(options: Models) -> None:
    """Print the catalogue."""
    records = _records()
    if options.as_json:
        print_out(json.dumps(records, indent=2))
        return
    for kind, of_kind in groupby(records, lambda record: record["kind"]):
        table = [(HEADINGS.get(kind, kind), *COLUMNS), *map(_cells, of_kind)]
        print_out("\n".join([*fitted_columns(table, RIGHT), ""]))
    reporter().note(f"~ is about; the cache is {constants.HF_HUB_CACHE}")
    reporter().note(f"a single file needs the text encoder {GEMMA} too, which is counted as to be downloaded")


def _records() -> list[dict[str, Any]]:
    """The catalogue, with the bytes that are here and those to download: of a single file also the text encoder's."""
    pages = {name: read_file(configs() / "model" / f"{name}.yaml").values for name in profile_names("model")}
    profiles = {str(values["checkpoint"]): name for name, values in pages.items() if "checkpoint" in values}
    records = dict[str, dict[str, Any]]()
    for entry in CATALOG:
        cached, complete = _cached(entry)
        size = cached if complete else entry.size
        state = {"size": size, "exact": complete or entry.exact, "cached": cached, "complete": complete}
        others = {"profile": profiles.get(entry.name), "to_download": max(size - cached, 0)}
        records[entry.name] = {**asdict(entry), **state, **others}
    missing = records[GEMMA]["to_download"]
    for entry in CATALOG:
        if entry.lacks_text_encoder:
            records[entry.name]["to_download"] += missing
    return list(records.values())


def _cached(entry: CatalogEntry) -> tuple[int, bool]:
    """Bytes of an entry in the cache, and whether that is all: no file is missing and its networks are there."""
    if entry.form == EMBEDDED:
        return sum(file.stat().st_size for file in DEMO_FOLDER.rglob("*") if file.is_file()), True
    files = cached_files(entry.name, entry.wanted)
    parts = {file.name.rpartition("/")[0] for file in files if file.name.endswith(".safetensors")}
    return sum(file.size for file in files if file.cached), all(file.cached for file in files) and entry.parts <= parts


def _cells(record: dict[str, Any]) -> tuple[str, ...]:
    partly = f"{quantity(record['cached'])} of it" if record["cached"] else "no"
    exact = record["exact"] and record["to_download"] <= max(record["size"] - record["cached"], 0)
    return (
        f"{record['profile']} ({record['name']})" if record["profile"] else record["name"],
        record["model_version"],
        record["recipe"],
        f"{record['form']}, gated" if record["gated"] else record["form"],
        f"{'' if record['exact'] else '~'}{quantity(record['size'])}",
        "yes" if record["complete"] else partly,
        f"{'' if exact else '~'}{quantity(record['to_download'])}",
    )


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
