"""`ltx2 info` and `ltx2 lora inspect`: what files are, and what made them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ltx2_cli.cli.inspect import (
    SHORT,
    CheckpointInfo,
    ClipInfo,
    FileInfo,
    LoraInfo,
    RecordInfo,
    inspect,
    lora_info,
    short_hash,
)
from ltx2_cli.console import columns, print_out
from ltx2_cli.units import natural

INFO_EXAMPLES = r"""[bold]Examples[/bold]

ltx2 info out/fox.mp4 out/fox.safetensors
ltx2 info --json out/fox.mp4
ltx2 info ~/LTX-2 ltx-2.3-22b-dev.safetensors"""

REQUEST = ("prompt", "negative_prompt", "model", "lora", "recipe", "num_inference_steps", "seed")  # shown of a record
UNKNOWN = "not to be told from its header: ltx2 or ltx2.3"
LONGEST_VALUE = 80  # characters of a value in a LoRA's metadata
Row = tuple[str, str]

lora = typer.Typer()


@lora.callback(invoke_without_command=True)
def overview(context: typer.Context) -> None:
    """Look into LoRA files."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@lora.command("inspect")
def inspect_lora(
    name: Annotated[
        str, typer.Argument(metavar="FILE", help=r"FILE, FOLDER or REPO\[/FILE]\[@REV].", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, the size in bytes.")] = False,
) -> None:
    """Say what a LoRA adds to and for which model version it was made. Only the file's header is read."""
    from ltx2_cli.weights.lora import open_lora
    from ltx2_cli.weights.lora_source import lora_file, parse_lora

    path = lora_file(parse_lora(name)[0])
    info = lora_info(path, open_lora(path))
    print_out(json.dumps(asdict(info), indent=2) if as_json else "\n".join(_lora_lines(info)))


def info(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files or folders.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, a list; sizes in bytes, records whole.")] = False,
) -> None:
    """Say what latents, videos, records, checkpoints, LoRAs and upsamplers are. Of weights only headers are read."""
    from ltx2_cli.weights.checkpoint import collect, raise_all

    infos, problems = collect({str(file): partial(inspect, file.expanduser()) for file in files})
    if as_json:
        print_out(json.dumps([_as_json(info) for info in infos.values()], indent=2))
    elif infos:
        print_out("\n\n".join("\n".join(_lines(info)) for info in infos.values()))
    raise_all(problems)


def _as_json(info: FileInfo) -> dict[str, Any]:
    """All that is known of a file; the texts of a record as in YAML, so that --config reads it."""
    from ltx2_cli.request.yaml_text import escaped, in_texts

    if isinstance(info, LoraInfo):
        return {"kind": "lora", **asdict(info)}
    facts = asdict(info)
    return {**facts, "record": in_texts(escaped, facts["record"])} if "record" in facts else facts


def _lines(info: FileInfo) -> Iterator[str]:
    match info:
        case LoraInfo():
            yield from _lora_lines(info)
        case RecordInfo():
            yield from columns([(info.kind, info.file), *_record_rows(info.record)])
        case ClipInfo():
            yield from columns([(info.kind, info.file), *_clip_rows(info)])
        case CheckpointInfo():
            yield from columns([(info.kind, info.file), *_checkpoint_rows(info)])


def _clip_rows(clip: ClipInfo) -> Iterator[Row]:
    from ltx2_cli.weights.checkpoint import shape_text

    rate = f", {clip.seconds:.2f} s at {clip.fps:g} frames a second" if clip.seconds and clip.fps else ""
    yield "size", natural(clip.bytes)
    yield "clip", f"{clip.width}x{clip.height}, {clip.num_frames} frames{rate}"
    if clip.latents:
        yield "latents", ", ".join(f"{name} {shape_text(shape)}" for name, shape in clip.latents.items())
    else:
        yield "sound", f"{clip.sample_rate} Hz" if clip.sample_rate else "none"
    yield from ((key, value) for key, value in (("model version", clip.model_version), ("stage", clip.stage)) if value)
    yield from _record_rows(clip.record) if clip.record else [("record", "none: the file does not say what made it")]


def _record_rows(record: Mapping[str, Any]) -> Iterator[Row]:
    """The request, as far as one knows a clip by it, and what it was made with."""
    from ltx2_cli.core.provenance import read_provenance

    for key in REQUEST:
        if record.get(key) not in (None, "", []):
            yield key.replace("_", " "), _one_line(record[key])
    provenance = read_provenance(record, "the record")
    yield "made with", ", ".join(f"{name} {version}" for name, version in provenance.versions.items())
    if provenance.devices:
        meshes = ", ".join(f"{stage} on {mesh}" for stage, mesh in provenance.meshes.items())
        yield "devices", f"{provenance.devices}: {meshes}"
    if provenance.source:
        yield "went on from", f"{provenance.source.file} {provenance.source.sha256[:SHORT]}"
    for number, (file, digest) in enumerate(provenance.files.items()):
        yield "" if number else "files", f"{file} {short_hash(digest)}"
    for stage, latents in provenance.latents.items():
        hashes = (f"{name} {fingerprint.sha256[:SHORT]}" for name, fingerprint in latents._asdict().items())
        yield f"after {stage}", ", ".join(hashes)


def _checkpoint_rows(info: CheckpointInfo) -> Iterator[Row]:
    yield "size", f"{natural(info.bytes)}, {_count(info.parameters)} parameters"
    yield "model version", info.model_version or UNKNOWN
    if info.variant:
        yield "variant", info.variant
    for axis, factor in (info.upsamples or {}).items():
        yield axis, f"x{factor:g}"
    for network in info.networks:
        yield network.name, f"{_count(network.parameters)}, {' and '.join(network.dtypes)}"


def _lora_lines(info: LoraInfo) -> Iterator[str]:
    """Facts, then the targets."""
    from ltx2_cli.weights.checkpoint import shape_text

    alphas = " and ".join("none" if alpha is None else str(alpha) for alpha in info.alphas)
    yield from columns(
        [
            ("file", info.file),
            ("size", f"{natural(info.bytes)}, {' and '.join(info.dtypes)}"),
            ("model version", info.model_version or UNKNOWN),
            ("targets", f"{info.pairs}, each a pair of keys"),
            ("rank", _range(info.ranks)),
            ("alpha", alphas if alphas != "none" else "none: the strength alone scales it"),
            *((key, _one_line(value, LONGEST_VALUE)) for key, value in sorted(info.metadata.items())),
        ]
    )
    yield ""
    yield from columns(
        [
            (
                group.name,
                shape_text(group.shape),
                f"rank {_range(group.ranks)}",
                f"{group.targets} layers" if "*" in group.name else "",
            )
            for group in info.targets
        ]
    )


def _range(ranks: tuple[int, ...]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"


def _one_line(value: object, longest: int | None = None) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    line = " ".join(text.split())
    return line if longest is None or len(line) <= longest else f"{line[: longest - 1]}…"


def _count(parameters: int) -> str:
    """Numbers as people say them: `18.9 B`, `0.5 M`."""
    return f"{parameters / 1e9:.1f} B" if parameters >= 5e7 else f"{parameters / 1e6:.1f} M"
