"""`ltx2 models`: what is published, and what of it is here."""

import json
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Annotated, Any

import typer

from ltx2_cli.console import columns, print_out, reporter
from ltx2_cli.weights.published import EMBEDDED, MODEL, PUBLISHED, TEXT_ENCODER, Published

HEADINGS = {MODEL: "models, for --model", TEXT_ENCODER: "text encoders, for --text-encoder"}
COLUMNS = ("generation", "recipe", "format", "size", "in the cache", "to download")
RIGHT = (4, 6)  # those of numbers, counted with the name before them


@dataclass(frozen=True)
class Row:
    """One published thing and how much of it is here. Sizes are bytes."""

    entry: Published
    profile: str | None  # the short name that --model takes too
    cached: int
    complete: bool
    text_encoder: int = 0  # what is missing of the text encoder that it does not hold itself

    @property
    def size(self) -> int:
        """Its size on the hub, to the byte once it is here."""
        return self.cached if self.complete else self.entry.size

    @property
    def exact(self) -> bool:
        """Whether the size is more than about right."""
        return self.complete or self.entry.exact

    @property
    def missing(self) -> int:
        """What of it is not here."""
        return max(self.size - self.cached, 0)


def models(as_json: Annotated[bool, typer.Option("--json", help="As JSON, sizes in bytes.")] = False) -> None:
    """List what is published, how large it is, and what of it is in the local cache. It asks no network."""
    from huggingface_hub import constants

    from ltx2_cli.profiles import GEMMA

    rows = _rows(GEMMA)
    if as_json:
        print_out(json.dumps([_record(row) for row in rows], indent=2))
        return
    for kind, of_kind in groupby(rows, lambda row: row.entry.kind):
        print_out("\n".join([*columns([(HEADINGS.get(kind, kind), *COLUMNS), *map(_cells, of_kind)], RIGHT), ""]))
    reporter().note(f"~ is about; the cache is {constants.HF_HUB_CACHE}")
    reporter().note(f"a single file needs the text encoder {GEMMA} too, which is counted as to be downloaded")


def _rows(text_encoder: str) -> list[Row]:
    rows = {entry.name: _row(entry) for entry in PUBLISHED}
    missing = rows[text_encoder].missing
    alone = [replace(row, text_encoder=missing) if row.entry.lacks_text_encoder else row for row in rows.values()]
    profiles = _profiles()
    return [replace(row, profile=profiles.get(row.entry.name)) for row in alone]


def _row(entry: Published) -> Row:
    """What the cache has of it: all of it where no file is missing and its networks are there."""
    from ltx2_cli.weights.hub import INSIDE, cached

    if entry.form == EMBEDDED:
        return Row(entry, None, sum(file.stat().st_size for file in INSIDE.rglob("*") if file.is_file()), True)
    files = cached(entry.name, entry.wanted)
    parts = {file.name.rpartition("/")[0] for file in files if file.name.endswith(".safetensors")}
    complete = all(file.cached for file in files) and entry.parts <= parts
    return Row(entry, None, sum(file.size for file in files if file.cached), complete)


def _profiles() -> dict[str, str]:
    """The profile of each checkpoint that has one."""
    from ltx2_cli.profile_layers import read_file
    from ltx2_cli.profiles import configs, profile_names

    pages = {name: read_file(configs() / "model" / f"{name}.yaml") for name in profile_names("model")}
    return {str(page.values["checkpoint"]): name for name, page in pages.items() if "checkpoint" in page.values}


def _cells(row: Row) -> tuple[str, ...]:
    from ltx2_cli.units import natural

    entry = row.entry
    partly = f"{natural(row.cached)} of it" if row.cached else "no"
    return (
        f"{row.profile} ({entry.name})" if row.profile else entry.name,
        entry.generation,
        entry.recipe,
        entry.form + ", gated" * entry.gated,
        _about(row.exact) + natural(row.size),
        "yes" if row.complete else partly,
        _about(row.exact and not row.text_encoder) + natural(row.missing + row.text_encoder),
    )


def _about(exact: bool) -> str:
    return "" if exact else "~"


def _record(row: Row) -> dict[str, Any]:
    return {
        **asdict(row.entry),
        "profile": row.profile,
        "size": row.size,
        "exact": row.exact,
        "cached": row.cached,
        "complete": row.complete,
        "to_download": row.missing + row.text_encoder,
    }
