"""`ltx2 info`: describe files and their origin. Reads only the headers of weights."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from ltx2_cli.artifacts.files import user_path
from ltx2_cli.console import columns, print_json, print_out
from ltx2_cli.core.provenance import read_provenance
from ltx2_cli.errors import RunError
from ltx2_cli.media.loudness import file_loudness
from ltx2_cli.request.layers import ASKED, ConfigLayer, flatten_valid
from ltx2_cli.request.old_keys import read_condition
from ltx2_cli.request.profiles import PROVENANCE
from ltx2_cli.request.spec import Decoder
from ltx2_cli.runs.inspect import FileFacts, inspect
from ltx2_cli.runs.trust import WEIGHTS_WORDS, files_named, weights_named
from ltx2_cli.units import quantity
from ltx2_cli.weights.checkpoint import collect, raise_all
from ltx2_cli.weights.digests import SHORT, short_hash
from ltx2_cli.weights.tensors import shape_text

REQUEST_KEYS = (
    "prompt",
    "segments",
    "windows",
    "negative_prompt",
    "conditions",
    "audio",
    "model",
    "lora",
    "recipe",
    "num_inference_steps",
    "sampler",
    "first_block_cache",
    "keyframes",
    "keyframe_segments",
    "decoder",
    "seed",
)  # shown of a record
LEFT_OUT_VALUES = {"windows": 1, "keyframes": 0, "decoder": Decoder.convolution.value}
NOT_TOLD = "not to be told from its header"
LONGEST_VALUE = 80  # characters of a value in a LoRA's metadata
Row = tuple[str, str]


def info(files: Sequence[Path], as_json: bool) -> None:
    """Print descriptions of the files. Raises `UsageError` afterwards for files of unknown kinds."""
    infos, problems = collect({str(file): partial(inspect, user_path(file)) for file in files})
    infos = {name: _with_loudness(facts) for name, facts in infos.items()}
    if as_json:
        print_json(list(infos.values()))
    elif infos:
        texts = (
            _lora_lines(facts) if facts["kind"] == "lora" else columns([*_rows(facts)]) for facts in infos.values()
        )
        print_out("\n\n".join(map("\n".join, texts)))
    raise_all(problems)


def _lora_lines(facts: FileFacts) -> Iterator[str]:
    """FileFacts, then the targets."""
    alphas = " and ".join("none" if alpha is None else str(alpha) for alpha in facts["alphas"])
    rows = [
        ("file", facts["file"]),
        ("size", f"{quantity(facts['bytes'])}, {' and '.join(facts['dtypes'])}"),
        ("model version", facts["model_version"] or NOT_TOLD),
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


def _rows(facts: FileFacts) -> Iterator[Row]:
    """Rows of any file except a LoRA."""
    yield facts["kind"], facts["file"]
    if "bytes" in facts:
        parameters = f", {_count(facts['parameters'])} parameters" if "networks" in facts else ""
        yield "size", quantity(facts["bytes"]) + parameters
    if "num_frames" in facts:
        seconds, fps = facts["seconds"], facts["fps"]
        rate = f", {seconds:.2f} s at {fps:g} frames a second" if seconds and fps else ""
        yield "clip", f"{facts['width']}x{facts['height']}, {facts['num_frames']} frames{rate}"
        if facts["latents"]:
            parts = [f"{name} {shape_text(shape)}" for name, shape in facts["latents"].items()]
            count = facts.get("generated_keyframes", 0)
            yield "latents", ", ".join([*parts, *([f"{count} generated keyframes"] if count else [])])
        else:
            yield "audio", f"{facts['sample_rate']} Hz{_loudness(facts)}" if facts["sample_rate"] else "none"
    elif facts["kind"] == "audio":
        yield "length", f"{facts['seconds']:.2f} s at {facts['sample_rate']} Hz{_loudness(facts)}"
    version = facts.get("model_version") or (NOT_TOLD if "networks" in facts else None)
    stated = {"model version": version, "stage": facts.get("stage"), "variant": facts.get("variant")}
    yield from ((key, value) for key, value in stated.items() if value)
    yield from ((axis, f"x{factor:g}") for axis, factor in (facts.get("upsamples") or {}).items())
    for network in facts.get("networks", ()):
        first, *others = (f"{number:,}{{}} {form}" for form, number in network["formats"].items())
        formats = ", ".join([first.format(" tensors"), *(other.format("") for other in others)])
        yield network["name"], f"{_count(network['parameters'])}, {formats}"
    if facts.get("record"):
        yield from _record_rows(facts["record"])
    elif "record" in facts:
        beside = "no file beside it says" if facts["kind"] == "audio" else "the file does not say"
        yield "record", f"none: {beside} what made it"


def _record_rows(record: FileFacts) -> Iterator[Row]:
    """The main values of the request, and its provenance."""
    for key in REQUEST_KEYS:
        if (value := record.get(key)) not in (None, "", [], LEFT_OUT_VALUES.get(key)):
            text = ", ".join(map(_item_text, value if isinstance(value, list) else [value]))
            yield key.replace("_", " "), " ".join(text.split())
    values, _ = flatten_valid(ConfigLayer("", {key: record[key] for key in record.keys() - {PROVENANCE, ASKED}}))
    for key, name in weights_named({**values, "lora": ()}):
        if name != values.get("model"):
            yield WEIGHTS_WORDS[key], name
    yield from ((word, name) for word, name, _ in files_named({**values, "conditions": (), "audio": None}))
    provenance = read_provenance(record, "the record")
    yield "made with", ", ".join(f"{name} {version}" for name, version in provenance.versions.items())
    if provenance.devices:
        meshes = ", ".join(f"{stage} on {mesh}" for stage, mesh in provenance.meshes.items())
        yield "devices", f"{provenance.devices}: {meshes}"
    if provenance.enhanced_from is not None:
        yield "enhanced from", provenance.enhanced_from
    if provenance.source:
        yield "went on from", f"{provenance.source.file} {provenance.source.sha256[:SHORT]}"
    for number, (file, digest) in enumerate(provenance.files.items()):
        yield "" if number else "files", f"{file} {short_hash(digest)}"
    for stage, latents in provenance.latents.items():
        hashes = (f"{name} {fingerprint.sha256[:SHORT]}" for name, fingerprint in latents._asdict().items())
        yield f"after {stage}", ", ".join(hashes)


def _loudness(facts: FileFacts) -> str:
    """Loudness and peak of a clip or a WAV, for its row."""
    if not (found := facts["loudness"]):
        return ""
    if found["peak"] is None:
        return ", silent"
    integrated = "" if found["integrated"] is None else f", {found['integrated']:.1f} LUFS"
    return f"{integrated}, peak {found['peak']:.1f} dB"


def _with_loudness(facts: FileFacts) -> FileFacts:
    """The facts of a file; those of a clip or a WAV with its loudness."""
    if facts["kind"] not in ("video", "audio"):
        return facts
    measured = None
    if facts["sample_rate"]:
        with suppress(RunError):  # ffmpeg cannot decode the audio: the other facts stand
            measured = file_loudness(Path(facts["file"]))._asdict()
    return {**facts, "loudness": measured}


def _item_text(item: object) -> str:
    """A value or an item of a list; input files as their options name them."""
    if isinstance(item, dict) and item.keys() <= {"path", "sha256"}:
        return str(item.get("path"))
    if isinstance(item, dict) and item.keys() >= {"path", "frame", "strength"}:
        strength = "" if item["strength"] is None else ":{strength}"
        words = {"reference": "reference {path}" + strength, "mask": "reference mask {path}"}
        level = ", from noise level {noise_level}" if item.get("noise_level", 1) != 1 else ""
        words |= {"clip": "frames {regenerate[0]} to {regenerate[1]} of clip {path} regenerated, {streams}" + level}
        with suppress(KeyError, IndexError, TypeError):  # a stranger's
            return words.get(item.get("kind", "image"), "{path}@{frame}" + strength).format_map(read_condition(item))
    return str(item)


def _count(parameters: int) -> str:
    """A count in short: `18.9 B`, `0.5 M`."""
    return f"{parameters / 1e9:.1f} B" if parameters >= 5e7 else f"{parameters / 1e6:.1f} M"
