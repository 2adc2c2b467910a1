"""`ltx2 info`: what files are, and what made them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ltx2_cli.cli.describe import SHORT, Clip, Description, Record, Weights, describe, shortened
from ltx2_cli.cli.lora import Summary, lora_lines
from ltx2_cli.console import columns, print_out

INFO_EXAMPLES = r"""[bold]Examples[/bold]

ltx2 info out/fox.mp4 out/fox.safetensors
ltx2 info --json out/fox.mp4
ltx2 info ~/LTX-2 ltx-2.3-22b-dev.safetensors"""

REQUEST = ("prompt", "negative_prompt", "model", "lora", "recipe", "num_inference_steps", "seed")  # shown of a record
Row = tuple[str, str]


def info(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files or folders.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, a list; sizes in bytes, records whole.")] = False,
) -> None:
    """Say what latents, videos, records, checkpoints, LoRAs and upsamplers are. Of weights only headers are read."""
    from ltx2_cli.weights.findings import attempt, refuse

    found, problems = attempt({str(file): partial(describe, file.expanduser()) for file in files})
    if as_json:
        print_out(json.dumps([_as_json(each) for each in found.values()], indent=2))
    elif found:
        print_out("\n\n".join("\n".join(_lines(each)) for each in found.values()))
    refuse(problems)


def _as_json(description: Description) -> dict[str, Any]:
    """All that is known of a file; the texts of a record as in YAML, so that --config reads it."""
    from ltx2_cli.yaml_text import escaped, in_texts

    if isinstance(description, Summary):
        return {"kind": "lora", **asdict(description)}
    facts = asdict(description)
    return {**facts, "record": in_texts(escaped, facts["record"])} if "record" in facts else facts


def _lines(description: Description) -> Iterator[str]:
    match description:
        case Summary():
            yield from lora_lines(description)
        case Record():
            yield from columns([_heading(description), *_of_record(description.record)])
        case Clip():
            yield from columns([_heading(description), *_of_clip(description)])
        case Weights():
            yield from columns([_heading(description), *_of_weights(description)])


def _heading(description: Record | Clip | Weights) -> Row:
    return description.kind, description.file


def _of_clip(clip: Clip) -> Iterator[Row]:
    from ltx2_cli.units import natural
    from ltx2_cli.weights.findings import by

    rate = f", {clip.seconds:.2f} s at {clip.fps:g} frames a second" if clip.seconds and clip.fps else ""
    yield "size", natural(clip.bytes)
    yield "clip", f"{clip.width}x{clip.height}, {clip.num_frames} frames{rate}"
    if clip.latents:
        yield "latents", ", ".join(f"{name} {by(shape)}" for name, shape in clip.latents.items())
    else:
        yield "sound", f"{clip.sample_rate} Hz" if clip.sample_rate else "none"
    yield from ((key, value) for key in ("generation", "stage") if (value := asdict(clip)[key]))
    yield from _of_record(clip.record) if clip.record else [("record", "none: the file does not say what made it")]


def _of_record(record: Mapping[str, Any]) -> Iterator[Row]:
    """The request, as far as one knows a clip by it, and what it was made with."""
    from ltx2_cli.core.made_with import read_made_with

    for key in REQUEST:
        if record.get(key) not in (None, "", []):
            yield key.replace("_", " "), _line(record[key])
    made = read_made_with(record, "the record")
    yield "made with", ", ".join(f"{name} {version}" for name, version in made.versions.items())
    if made.devices:
        meshes = ", ".join(f"{stage} on {mesh}" for stage, mesh in made.meshes.items())
        yield "devices", f"{made.devices}: {meshes}"
    if made.source:
        yield "went on from", f"{made.source.file} {made.source.sha256[:SHORT]}"
    for number, (file, digest) in enumerate(made.files.items()):
        yield "" if number else "files", f"{file} {shortened(digest)}"
    for stage, latents in made.latents.items():
        hashes = (f"{name} {each.sha256[:SHORT]}" for name, each in latents._asdict().items())
        yield f"after {stage}", ", ".join(hashes)


def _line(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return " ".join(text.split())


def _of_weights(weights: Weights) -> Iterator[Row]:
    from ltx2_cli.units import natural

    yield "size", f"{natural(weights.bytes)}, {_count(weights.parameters)} parameters"
    yield "generation", weights.generation or "not to be told from its header: ltx2 or ltx2.3"
    if weights.variant:
        yield "variant", weights.variant
    for what, factor in (weights.upsamples or {}).items():
        yield what, f"x{factor:g}"
    for part in weights.networks:
        yield part.name, f"{_count(part.parameters)}, {' and '.join(part.dtypes)}"


def _count(parameters: int) -> str:
    """Numbers as people say them: `18.9 B`, `0.5 M`."""
    return f"{parameters / 1e9:.1f} B" if parameters >= 5e7 else f"{parameters / 1e6:.1f} M"
