"""`ltx2 info` and `ltx2 lora inspect`: what a file is, and what made it. Only headers of weights are read."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from ltx2_cli.artifacts.files import read_limited, refuse_special, user_path
from ltx2_cli.artifacts.outputs import record_path
from ltx2_cli.cli.commands import Info, Lora
from ltx2_cli.cli.generate import looks_like_safetensors
from ltx2_cli.cli.trust import WEIGHTS, files_named, weights_named
from ltx2_cli.console import columns, print_json, print_out
from ltx2_cli.core.provenance import UNFINISHED, read_provenance
from ltx2_cli.diffusion.latents import SIZE, open_latents
from ltx2_cli.errors import UsageError
from ltx2_cli.media.probe import is_video, is_wav, open_video, open_wav
from ltx2_cli.request.layers import ASKED, MAX_TEXT, ConfigLayer, flatten_valid, read_text
from ltx2_cli.request.profiles import PROVENANCE
from ltx2_cli.request.spec import Streams
from ltx2_cli.units import quantity
from ltx2_cli.weights.checkpoint import TensorFiles, collect, raise_all, read_header, shape_text
from ltx2_cli.weights.lora import FACTOR, LoraFile, LoraPair, lora_file, model_version, open_lora, parse_lora

KNOWN = "known are latents, mp4 videos, WAVs, records, checkpoints (a folder or a file), LoRAs and latent upsamplers"
UPSAMPLER = "initial_conv.weight"  # a tensor of every latent upsampler
DENOISER = "model.diffusion_model."  # prefix of the denoiser's tensors in a single file
RECORDS = (".yaml", ".yml", ".json")
REQUEST = (
    "prompt",
    "negative_prompt",
    "conditions",
    "audio",
    "model",
    "lora",
    "recipe",
    "num_inference_steps",
    "seed",
)  # shown of a record
LAYER = re.compile(r"(blocks)\.\d+\.")
UNKNOWN = "not to be told from its header: ltx2 or ltx2.3"
LONGEST_VALUE = 80  # characters of a value in a LoRA's metadata
SHORT = 12  # digits of a hash that people read
Facts = dict[str, Any]  # as JSON has them; None is what a file does not say of itself
Row = tuple[str, str]


def info(options: Info) -> None:
    """Print what the files are. Raises `UsageError` afterwards for those that are nothing that is known."""
    infos, problems = collect({str(file): partial(inspect, user_path(file)) for file in options.files})
    if options.as_json:
        print_json(list(infos.values()))
    elif infos:
        texts = (
            _lora_lines(facts) if facts["kind"] == "lora" else columns([*_rows(facts)]) for facts in infos.values()
        )
        print_out("\n\n".join(map("\n".join, texts)))
    raise_all(problems)


def lora(options: Lora) -> None:
    """Print what a LoRA adds to, and for which model version it was made."""
    facts = _lora(open_lora(lora_file(parse_lora(options.name)[0])))
    print_json(facts) if options.as_json else print_out("\n".join(_lora_lines(facts)))


def inspect(path: Path) -> Facts:
    """What `path` is: its `kind`, `file`, and more; a clip, latents, a record or an unfinished run has a `record`, the
    request that made it. Raises `UsageError` where it is damaged, or of no known kind."""
    if path.is_dir():
        from ltx2_cli.models.networks import is_checkpoint, open_folder

        if is_checkpoint(path):
            return _checkpoint(path, open_folder(path))
        files = sorted(path.glob("*.safetensors"))
        if len(files) == 1:
            return _tensors(files[0], path)
        names = ", ".join(file.name for file in files[:5])
        raise _unknown(path, f": it holds {len(files)} safetensors files, {names}" if files else "")
    refuse_special(path, KNOWN)
    try:
        video, wav, tensors = is_video(path), is_wav(path), looks_like_safetensors(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", KNOWN) from error
    if video:
        clip = open_video(path)
        facts = {name: value for name, value in vars(clip).items() if name not in ("metadata", "uneven")}
        return _clip("video", path, clip.metadata, {**facts, "latents": None})
    if wav:
        return _sound(path)
    if tensors or path.suffix == ".safetensors":
        return _tensors(path, path)
    if path.suffix not in RECORDS:
        raise _unknown(path, "")
    try:
        text = read_limited(path, MAX_TEXT, KNOWN).decode("utf-8")
    except UnicodeDecodeError:
        raise _unknown(path, ": it is not text") from None
    return {"kind": "record", "file": str(path), "record": _parsed(text, str(path))}


def _unknown(path: Path, reason: str) -> UsageError:
    return UsageError(f"{path} is nothing that is known here{reason}", KNOWN)


def _tensors(path: Path, place: Path) -> Facts:
    """A safetensors file, by the names of its tensors; `place` is what the user named."""
    tensors, metadata = read_header(path)
    if UNFINISHED in metadata and "record" in metadata:
        record = _parsed(metadata["record"], f"the record in {path}")
        return {"kind": "unfinished run", "file": str(path), "record": record}
    if tensors.keys() >= set(Streams._fields):
        file = open_latents(path)
        seconds = file.size[0] / file.fps if file.fps else None
        facts = {"fps": file.fps, "seconds": seconds, "sample_rate": None, "latents": file.shapes._asdict()}
        return _clip("latents", path, file.metadata, {**dict(zip(SIZE, file.size, strict=True)), **facts})
    if any(FACTOR.fullmatch(name) for name in tensors):
        return {"kind": "lora", **_lora(open_lora(path))}
    if UPSAMPLER in tensors:
        from ltx2_cli.models.upsampler import open_upsampler

        arch, files = open_upsampler(place, None)
        factors = {"time": float(arch.upsampling.time), "space": arch.upsampling.up / arch.upsampling.down}
        stated = {"model_version": arch.model_version, "variant": None, "upsamples": factors}
        return {"kind": "latent upsampler", "file": str(place), **stated, **_weights({"latent_upsampler": files})}
    if any(name.startswith(DENOISER) for name in tensors):
        from ltx2_cli.models.networks import open_file

        return _checkpoint(path, open_file(path, None))
    names = ", ".join(f"`{name}`" for name in list(tensors)[:3])
    raise _unknown(path, f": it holds {names or 'nothing'}")


def _clip(kind: str, path: Path, metadata: Mapping[str, str], facts: Facts) -> Facts:
    """A video or latents, with what the metadata says of both alike."""
    record, stated = None, {name: metadata.get(name) for name in ("model_version", "stage")}
    if "record" in metadata:
        try:
            record = _parsed(metadata["record"], f"the record in {path}")
        except UsageError as error:
            raise UsageError(str(error), "it was changed after it was written") from error
    return {"kind": kind, "file": str(path), "bytes": path.stat().st_size, **stated, **facts, "record": record}


def _sound(path: Path) -> Facts:
    """A WAV, with the record beside it where that is one of a sound made alone: a WAV has no place for its own."""
    seconds, rate = open_wav(path)
    facts = {"kind": "sound", "file": str(path), "bytes": path.stat().st_size, "seconds": seconds, "sample_rate": rate}
    record = None
    if (beside := record_path(path)).is_file():
        with suppress(UsageError):  # another file of that name
            stated = inspect(beside)["record"]
            record = stated if stated.get("streams") == "audio" else None
    return {**facts, "record": record}


def _parsed(text: str, source: str) -> Facts:
    """A record. Raises `UsageError` where the text is none."""
    values = dict(read_text(text, source).values)
    if not isinstance(values.get(PROVENANCE), dict):
        raise UsageError(f"{source} is no record of a clip: it does not say what it was `{PROVENANCE}`", KNOWN)
    read_provenance(values, source)
    return values


def _checkpoint(path: Path, checkpoint: Any) -> Facts:
    from ltx2_cli.plan.recipe import is_distilled

    arch, variant = checkpoint.arch, "distilled" if is_distilled(str(path), checkpoint.arch.scheduler) else "dev"
    facts = {"file": str(path), "model_version": arch.model_version, "variant": variant, "upsamples": None}
    return {"kind": "checkpoint", **facts, **_weights(checkpoint.files)}


def _weights(files: Mapping[str, TensorFiles]) -> Facts:
    """The size of networks; the data type with the most numbers comes first."""
    networks = list[Facts]()
    for name, tensors in files.items():
        numbers = Counter[str]()
        for tensor in tensors.values():
            numbers[tensor.dtype] += prod(tensor.shape)
        dtypes = [dtype for dtype, _ in numbers.most_common()]
        networks.append({"name": name, "parameters": numbers.total(), "dtypes": dtypes})
    size = sum(path.stat().st_size for path in {tensor.file for part in files.values() for tensor in part.values()})
    parameters = sum(network["parameters"] for network in networks)
    return {"bytes": size, "parameters": parameters, "networks": networks}


def _lora(file: LoraFile) -> Facts:
    """What the header of a LoRA says. Targets that differ in their layer alone are one, with `*` for the layer."""
    pairs, groups = file.pairs.values(), dict[tuple[str, tuple[int, int]], list[LoraPair]]()
    for target, pair in file.pairs.items():
        groups.setdefault((LAYER.sub(r"\1.*.", target), pair.shape), []).append(pair)
    return {
        "file": str(file.path),
        "bytes": file.path.stat().st_size,
        "model_version": model_version(file),
        "pairs": len(pairs),
        "ranks": sorted({pair.rank for pair in pairs}),
        # each is `tensor`, a number that the config states, or None
        "alphas": sorted({"tensor" if isinstance(pair.alpha, str) else pair.alpha for pair in pairs}, key=str),
        "dtypes": sorted({dtype for pair in pairs for dtype in pair.dtypes}),
        "metadata": file.files.metadata,
        "targets": [
            {"name": name, "shape": shape, "targets": len(group), "ranks": sorted({pair.rank for pair in group})}
            for (name, shape), group in sorted(groups.items())
        ],
    }


def _lora_lines(facts: Facts) -> Iterator[str]:
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


def _rows(facts: Facts) -> Iterator[Row]:
    """What is shown of anything but a LoRA."""
    yield facts["kind"], facts["file"]
    if "bytes" in facts:
        parameters = f", {_count(facts['parameters'])} parameters" if "networks" in facts else ""
        yield "size", quantity(facts["bytes"]) + parameters
    if "num_frames" in facts:
        seconds, fps = facts["seconds"], facts["fps"]
        rate = f", {seconds:.2f} s at {fps:g} frames a second" if seconds and fps else ""
        yield "clip", f"{facts['width']}x{facts['height']}, {facts['num_frames']} frames{rate}"
        if facts["latents"]:
            yield "latents", ", ".join(f"{name} {shape_text(shape)}" for name, shape in facts["latents"].items())
        else:
            yield "sound", f"{facts['sample_rate']} Hz" if facts["sample_rate"] else "none"
    elif facts["kind"] == "sound":
        yield "length", f"{facts['seconds']:.2f} s at {facts['sample_rate']} Hz"
    version = facts.get("model_version") or (UNKNOWN if "networks" in facts else None)
    stated = {"model version": version, "stage": facts.get("stage"), "variant": facts.get("variant")}
    yield from ((key, value) for key, value in stated.items() if value)
    yield from ((axis, f"x{factor:g}") for axis, factor in (facts.get("upsamples") or {}).items())
    for network in facts.get("networks", ()):
        yield network["name"], f"{_count(network['parameters'])}, {' and '.join(network['dtypes'])}"
    if facts.get("record"):
        yield from _record_rows(facts["record"])
    elif "record" in facts:
        beside = "no file beside it says" if facts["kind"] == "sound" else "the file does not say"
        yield "record", f"none: {beside} what made it"


def _record_rows(record: Facts) -> Iterator[Row]:
    """The request, as far as one knows a clip by it, and what it was made with."""
    for key in REQUEST:
        if (value := record.get(key)) not in (None, "", []):
            text = ", ".join(map(_item_text, value if isinstance(value, list) else [value]))
            yield key.replace("_", " "), " ".join(text.split())
    values, _ = flatten_valid(ConfigLayer("", {key: record[key] for key in record.keys() - {PROVENANCE, ASKED}}))
    for key, name in weights_named({**values, "lora": ()}):
        if name != values.get("model"):
            yield WEIGHTS[key], name
    yield from ((word, name) for word, name, _ in files_named({**values, "conditions": (), "audio": None}))
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


def _item_text(item: object) -> str:
    """A value, or an item of a list, what a clip is given as its option names it."""
    if isinstance(item, dict) and item.keys() <= {"path", "sha256"}:
        return str(item.get("path"))
    if isinstance(item, dict) and item.keys() >= {"path", "frame", "strength"}:
        words = {"reference": "reference {path}:{strength}", "mask": "reference mask {path}"}
        words |= {"clip": "frames {anew[0]} to {anew[1]} of clip {path} anew, {streams}"}
        with suppress(KeyError, IndexError, TypeError):  # a stranger's
            return words.get(item.get("kind", "image"), "{path}@{frame}:{strength}").format_map(item)
    return str(item)


def short_hash(digest: str) -> str:
    """A hash as people read it, with the part of a file that it is of, if not the whole."""
    part, _, digits = digest.rpartition(" ")
    return f"{part} {digits[:SHORT]}".strip()


def _count(parameters: int) -> str:
    """Numbers as people say them: `18.9 B`, `0.5 M`."""
    return f"{parameters / 1e9:.1f} B" if parameters >= 5e7 else f"{parameters / 1e6:.1f} M"
