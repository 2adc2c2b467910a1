"""`ltx2 lora`: what a LoRA file holds."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ltx2_cli.console import columns, print_out
from ltx2_cli.units import natural

if TYPE_CHECKING:
    from ltx2_cli.weights.lora import LoraFile, Pair

LAYER = re.compile(r"(blocks)\.\d+\.")
SHOWN = 80  # characters of a value in the metadata

lora = typer.Typer()


@lora.callback(invoke_without_command=True)
def overview(context: typer.Context) -> None:
    """Look into LoRA files."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@dataclass(frozen=True)
class Group:
    """The targets that differ in their layer alone."""

    name: str  # with `*` for the layer
    shape: tuple[int, int]  # (out, in)
    targets: int
    ranks: tuple[int, ...]  # each that occurs, smallest first


@dataclass(frozen=True)
class Summary:
    """What the header of a LoRA says."""

    file: str
    bytes: int
    generation: str | None
    pairs: int
    ranks: tuple[int, ...]
    alphas: tuple[str | float | None, ...]  # `tensor`, a number that its config states, or None
    dtypes: tuple[str, ...]
    metadata: Mapping[str, str]
    targets: tuple[Group, ...]


@lora.command()
def inspect(
    name: Annotated[
        str, typer.Argument(metavar="FILE", help=r"FILE, FOLDER or REPO\[/FILE]\[@REV].", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, the size in bytes.")] = False,
) -> None:
    """Say what a LoRA adds to and for which generation it was made. Only the file's header is read."""
    from ltx2_cli.weights.lora import open_lora
    from ltx2_cli.weights.lora_source import lora_file, parse_lora

    path = lora_file(parse_lora(name)[0])
    summary = summarise(path, open_lora(path))
    print_out(json.dumps(asdict(summary), indent=2) if as_json else "\n".join(lora_lines(summary)))


def summarise(path: Path, file: "LoraFile") -> Summary:
    """What there is to say of an open LoRA."""
    from ltx2_cli.models.lora_generation import generation

    pairs = file.pairs.values()
    alphas = {"tensor" if isinstance(pair.alpha, str) else pair.alpha for pair in pairs}
    return Summary(
        str(path),
        path.stat().st_size,
        generation(file),
        len(pairs),
        _ranks(pairs),
        tuple(sorted(alphas, key=str)),
        tuple(sorted({dtype for pair in pairs for dtype in pair.dtypes})),
        file.files.metadata(),
        tuple(_groups(file.pairs)),
    )


def _groups(pairs: "Mapping[str, Pair]") -> Iterator[Group]:
    members: dict[tuple[str, tuple[int, int]], list[Pair]] = {}
    for target, pair in pairs.items():
        members.setdefault((LAYER.sub(r"\1.*.", target), pair.shape), []).append(pair)
    for (name, shape), alike in sorted(members.items()):
        yield Group(name, shape, len(alike), _ranks(alike))


def _ranks(pairs: "Iterable[Pair]") -> tuple[int, ...]:
    return tuple(sorted({pair.rank for pair in pairs}))


def lora_lines(summary: Summary) -> Iterator[str]:
    """The summary for people: facts, then the targets."""
    stated = " and ".join("none" if alpha is None else str(alpha) for alpha in summary.alphas)
    yield from columns(
        [
            ("file", summary.file),
            ("size", f"{natural(summary.bytes)}, {' and '.join(summary.dtypes)}"),
            ("generation", summary.generation or "not to be told from its header: ltx2 or ltx2.3"),
            ("targets", f"{summary.pairs}, each a pair of keys"),
            ("rank", _range(summary.ranks)),
            ("alpha", stated if stated != "none" else "none: the strength alone scales it"),
            *((key, _brief(value)) for key, value in sorted(summary.metadata.items())),
        ]
    )
    yield ""
    yield from columns([_cells(group) for group in summary.targets])


def _cells(group: Group) -> tuple[str, ...]:
    layers = f"{group.targets} layers" if "*" in group.name else ""
    return group.name, "x".join(map(str, group.shape)), f"rank {_range(group.ranks)}", layers


def _range(ranks: tuple[int, ...]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"


def _brief(value: str) -> str:
    line = " ".join(value.split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 1]}…"
