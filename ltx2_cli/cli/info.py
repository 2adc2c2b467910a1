"""`ltx2 info`: what files are, and what made them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from ltx2_cli.cli.inspect import SHORT, CheckpointInfo, ClipInfo, FileInfo, inspect, short_hash
from ltx2_cli.cli.lora import UNKNOWN, LoraInfo, lora_lines, one_line
from ltx2_cli.cli.options import Info
from ltx2_cli.console import columns, print_out
from ltx2_cli.core.provenance import read_provenance
from ltx2_cli.request.yaml_text import escaped, in_texts
from ltx2_cli.units import quantity
from ltx2_cli.weights.checkpoint import collect, raise_all, shape_text

REQUEST = ("prompt", "negative_prompt", "model", "lora", "recipe", "num_inference_steps", "seed")  # shown of a record
Row = tuple[str, str]


def info(options: Info) -> None:
    """Print what the files are. Raises `UsageError` afterwards for those that are nothing that is known."""
    infos, problems = collect({str(file): partial(inspect, file.expanduser()) for file in options.files})
    if options.as_json:
        print_out(json.dumps([_as_json(info) for info in infos.values()], indent=2))
    elif infos:
        print_out("\n\n".join("\n".join(_lines(info)) for info in infos.values()))
    raise_all(problems)


def _as_json(info: FileInfo) -> dict[str, Any]:
    """All that is known of a file; the texts of a record as in YAML, so that --config reads it."""
    facts = asdict(info)
    if isinstance(info, LoraInfo):
        return {"kind": "lora", **facts}
    return {**facts, "record": in_texts(escaped, facts["record"])} if "record" in facts else facts


def _lines(info: FileInfo) -> Iterator[str]:
    if isinstance(info, LoraInfo):
        yield from lora_lines(info)
        return
    rows = [(info.kind, info.file)]
    if isinstance(info, ClipInfo):
        rows += _clip_rows(info)
    if isinstance(info, CheckpointInfo):
        rows += _checkpoint_rows(info)
    elif info.record is not None:
        rows += _record_rows(info.record)
    else:
        rows.append(("record", "none: the file does not say what made it"))
    yield from columns(rows)


def _clip_rows(clip: ClipInfo) -> Iterator[Row]:
    rate = f", {clip.seconds:.2f} s at {clip.fps:g} frames a second" if clip.seconds and clip.fps else ""
    yield "size", quantity(clip.bytes)
    yield "clip", f"{clip.width}x{clip.height}, {clip.num_frames} frames{rate}"
    if clip.latents:
        yield "latents", ", ".join(f"{name} {shape_text(shape)}" for name, shape in clip.latents.items())
    else:
        yield "sound", f"{clip.sample_rate} Hz" if clip.sample_rate else "none"
    yield from ((key, value) for key, value in (("model version", clip.model_version), ("stage", clip.stage)) if value)


def _record_rows(record: Mapping[str, Any]) -> Iterator[Row]:
    """The request, as far as one knows a clip by it, and what it was made with."""
    for key in REQUEST:
        if record.get(key) not in (None, "", []):
            yield key.replace("_", " "), one_line(record[key])
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
    yield "size", f"{quantity(info.bytes)}, {_count(info.parameters)} parameters"
    yield "model version", info.model_version or UNKNOWN
    if info.variant:
        yield "variant", info.variant
    for axis, factor in (info.upsamples or {}).items():
        yield axis, f"x{factor:g}"
    for network in info.networks:
        yield network.name, f"{_count(network.parameters)}, {' and '.join(network.dtypes)}"


def _count(parameters: int) -> str:
    """Numbers as people say them: `18.9 B`, `0.5 M`."""
    return f"{parameters / 1e9:.1f} B" if parameters >= 5e7 else f"{parameters / 1e6:.1f} M"
