"""`ltx2 gallery`: the clips of a folder on one HTML page that loads nothing from a network. Records are untrusted: the
page has them as JSON and shows them only as text."""

import html
import json
import math
import os
import re
import shlex
from base64 import b64encode
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from ltx2_cli.artifacts.files import Output, read_limited, replacing, reserve, user_path
from ltx2_cli.artifacts.outputs import check_outputs, record_path
from ltx2_cli.console import print_made, reporter
from ltx2_cli.errors import UsageError
from ltx2_cli.media.write import WAV
from ltx2_cli.request.layers import ASKED
from ltx2_cli.request.profiles import CACHE, OUTPUT_KEYS, PROVENANCE
from ltx2_cli.request.validation import STEERING
from ltx2_cli.runs.inspect import FileFacts as Facts
from ltx2_cli.runs.inspect import inspect
from ltx2_cli.units import quantity
from ltx2_cli.weights.checkpoint import abbreviate

TEMPLATE = Path(__file__).with_suffix(".html")
PAGE_NAME = "gallery.html"
GENERATOR = b'<meta name="generator" content="ltx2 gallery">'
MAX_EMBEDDED = 2**28  # bytes of clips in a page; browsers open such a page within seconds
MAX_TIMINGS = 2**22  # bytes of a file that --perf-dump wrote; a step has about 70
NOT_SETTINGS = {"prompt", "seed", ASKED, PROVENANCE, CACHE, *OUTPUT_KEYS}  # keys of a record that are no settings
AUDIO_STEPS = 10  # a second, in place of frames, by which two audio tracks are compared
INNER = re.compile(r"sharding\.(?!profile)")  # the mesh itself is in the provenance


def gallery(folder: Path, output: Path | None, embed: bool, force: bool, as_json: bool) -> None:
    """Write the page and print its path. Raises `UsageError` if there is no clip."""
    folder = user_path(folder)
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder", "name the folder that holds the clips")
    page = user_path(output) if output else folder / PAGE_NAME
    paths = sorted(path for path in folder.rglob("*") if _is_clip(path))
    reads = [path.with_suffix(suffix) for path in paths for suffix in (path.suffix, ".yaml", ".json")]
    check_outputs([Output(page, "-o")], reads, force, own={page} if _is_gallery(page) else ())
    size = sum(path.stat().st_size for path in paths)
    if embed and size > MAX_EMBEDDED:
        sentence = f"the clips have {quantity(size)}; a page of at most {quantity(MAX_EMBEDDED)} is written"
        raise UsageError(sentence, "leave out --embed: the page then refers to them")
    report = reporter()
    with report.activity(f"read {len(paths)} clips"), ThreadPoolExecutor(os.cpu_count()) as threads:  # by ffmpeg
        found = list(threads.map(partial(_entry, folder, page, embed), paths))
    problems = [str(entry) for entry in found if isinstance(entry, UsageError)]
    if problems:
        report.note(f"left out, {len(problems)} of {len(paths)}: {abbreviate(problems)}")
    clips = [entry for entry in found if isinstance(entry, dict)]
    if not clips:
        raise UsageError(
            f"{folder} holds no clip that can be read", "name a folder with mp4 videos, or WAVs and their records"
        )
    with reserve([Output(page, "-o")]), replacing(page) as temporary:
        temporary.write_text(_filled(clips, folder.resolve().name or "clips"), encoding="utf-8")
    facts = {"paths": [str(page)], "clips": [entry["file"] for entry in clips], "left_out": problems}
    print_made(json.dumps(facts, ensure_ascii=False) if as_json else str(page))


def _is_clip(path: Path) -> bool:
    """Whether it has the name of a clip; a WAV only with a record beside it."""
    named = path.suffix == ".mp4" or (path.suffix == WAV and record_path(path).is_file())
    return named and not path.name.startswith(".") and path.is_file()


def _is_gallery(page: Path) -> bool:
    """Whether this command wrote it."""
    if not page.is_file():
        return False
    with page.open("rb") as file:
        return GENERATOR in file.read(200)


def _filled(clips: list[Facts], title: str) -> str:
    """The page. Its policy lets it run its own script and no other, and ask no network for anything."""
    template = TEMPLATE.read_text(encoding="utf-8")
    hashes = {tag: b64encode(sha256(text.encode()).digest()).decode() for tag, text in _blocks(template)}
    policy = (
        f"default-src 'none'; media-src 'self' file: data:; style-src 'sha256-{hashes['style']}';"
        f" script-src 'sha256-{hashes['script']}'; base-uri 'none'; form-action 'none'"
    )
    data = json.dumps(clips, separators=(",", ":")).replace("<", "\\u003c")  # ends no script
    fields = {"{policy}": policy, "{title}": html.escape(title), "{clips}": data}
    return re.sub("|".join(map(re.escape, fields)), lambda match: fields[match[0]], template)


def _blocks(template: str) -> Iterator[tuple[str, str]]:
    """The style and the script, as a browser hashes them."""
    for match in re.finditer(r"<(style|script)>(.*?)</\1>", template, re.DOTALL):
        yield match[1], match[2]


def _entry(folder: Path, page: Path, embed: bool, path: Path) -> Facts | UsageError | None:
    """The page's facts of a clip, or the reason that it cannot be read; None for a WAV that is no clip."""
    try:
        facts = inspect(path)
    except UsageError as error:
        return error
    record, seen = facts["record"] or {}, facts["kind"] == "video"
    if not (seen or record):
        return None
    source = os.path.relpath(path, page.parent)
    kind = "video/mp4" if seen else "audio/wav"
    data = f"data:{kind};base64,{b64encode(path.read_bytes()).decode()}" if embed else quote(os.fsencode(source))
    return {
        "file": _name(path.relative_to(folder)),
        "src": data,
        "prompt": str(record.get("prompt") or ""),
        "seed": _seed(record.get("seed")),
        "size": f"{facts['width']}x{facts['height']}" if seen else "",
        "frames": facts["num_frames"] if seen else 0,
        "fps": facts["fps"] if seen else AUDIO_STEPS,
        "seconds": facts["seconds"],
        "audio": facts["sample_rate"] is not None,
        "settings": dict(_settings(record)),
        "made": path.stat().st_mtime,
        **_timings(path.with_suffix(".json")),
        "command": _command(path) if record else "",
    }


def _seed(value: object) -> int | None:
    """The seed of a record, which has one, or several in the record of a run."""
    match value:
        case [int(seed)] if type(seed) is int and 0 <= seed < 2**32:
            return seed
    return None


def _name(path: Path) -> str:
    """A path as text; bytes of its name that are no text are replaced."""
    return os.fsencode(path).decode(errors="replace")


def _command(path: Path) -> str:
    """The command that makes the clip again; empty for a name with control characters."""
    name = _name(path)
    return "" if STEERING.search(name) or "�" in name else f"ltx2 generate --config {shlex.quote(name)}"


def _settings(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The values of a request that are not empty, by their dotted keys; then versions, devices and meshes."""
    provenance = record.get(PROVENANCE, {})
    for key, value in _flat({key: value for key, value in record.items() if key not in NOT_SETTINGS}):
        if not INNER.match(key):
            yield key, value
    for key in ("ltx2", "jax", "devices", "meshes"):
        yield from _flat({key: provenance[key]} if key in provenance else {})


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Values by dotted key, as text."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value not in (None, "", []):
            yield f"{prefix}{name}", json.dumps(value) if isinstance(value, list) else str(value)


def _timings(path: Path) -> dict[str, float | None]:
    """Seconds of the run and of a step, from the file that --perf-dump wrote beside a clip, if any."""
    try:
        dump = json.loads(read_limited(path, MAX_TIMINGS, "name a file that --perf-dump wrote"))
        steps = [float(step["duration_ms"]) for step in dump["denoise_steps_ms"]]
        times = {"took": float(dump["total_duration_ms"]) / 1000, "step": median(steps) / 1000}
    except (OSError, UsageError, ValueError, KeyError, TypeError, RecursionError):
        times = {}  # no such file, or another program's
    return {name: times[name] if math.isfinite(times.get(name, math.nan)) else None for name in ("took", "step")}
