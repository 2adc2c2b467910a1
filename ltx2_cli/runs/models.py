"""`ltx2 models`: published models, and their files on this machine."""

import json
from dataclasses import asdict
from itertools import groupby
from typing import Any

from huggingface_hub import constants

from ltx2_cli.console import fitted_columns, print_out, reporter
from ltx2_cli.request.layers import read_file
from ltx2_cli.request.profiles import GEMMA, SAFETENSORS, configs, profile_names
from ltx2_cli.units import quantity
from ltx2_cli.weights.hub import DEMO_FOLDER, cached_files
from ltx2_cli.weights.published import CATALOG, IN_PACKAGE, MODEL_KIND, TEXT_ENCODER_KIND, CatalogEntry

HEADINGS = {MODEL_KIND: "models", TEXT_ENCODER_KIND: "text encoders"}
COLUMNS = ("model version", "recipe", "format", "size", "in the cache", "to download")
RIGHT = (4, 6)  # columns of numbers, counted with the name before them


def models(as_json: bool) -> None:
    """Print the catalogue."""
    records = _records()
    if as_json:
        print_out(json.dumps(records, indent=2))
        return
    for kind, of_kind in groupby(records, lambda record: record["kind"]):
        table = [(HEADINGS.get(kind, kind), *COLUMNS), *map(_cells, of_kind)]
        print_out("\n".join([*fitted_columns(table, RIGHT), ""]))
    reporter().note(f"~ is about; the cache is {constants.HF_HUB_CACHE}")
    reporter().note(f"a single file needs the text encoder {GEMMA} too, which is counted as to be downloaded")


def _records() -> list[dict[str, Any]]:
    """The catalogue, with bytes on this machine and bytes to download; a single file's include the text encoder's."""
    pages = {name: read_file(configs() / "model" / f"{name}.yaml").values for name in profile_names("model")}
    profiles = {str(values["checkpoint"]): name for name, values in pages.items() if "checkpoint" in values}
    records = dict[str, dict[str, Any]]()
    for entry in CATALOG:
        cached, complete = in_cache(entry)
        size = cached if complete else entry.size
        state = {"size": size, "exact": complete or entry.exact, "cached": cached, "complete": complete}
        others = {"profile": profiles.get(entry.name), "to_download": max(size - cached, 0)}
        records[entry.name] = {**asdict(entry), **state, **others}
    missing = records[GEMMA]["to_download"]
    for entry in CATALOG:
        if entry.lacks_text_encoder:
            records[entry.name]["to_download"] += missing
    return list(records.values())


def in_cache(entry: CatalogEntry) -> tuple[int, bool]:
    """Bytes of an entry in the cache, and whether it is complete: no file and no network is missing."""
    if entry.form == IN_PACKAGE:
        return sum(file.stat().st_size for file in DEMO_FOLDER.rglob("*") if file.is_file()), True
    files = cached_files(entry.name, entry.wanted)
    parts = {file.name.rpartition("/")[0] for file in files if file.name.endswith(SAFETENSORS)}
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
