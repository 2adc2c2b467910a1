"""Jobs: the lines of a file, each a request; which of them a worker makes, and in which order."""

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from ltx2_cli.errors import UsageError
from ltx2_cli.files import read_limited, user_path
from ltx2_cli.request.layers import MAX_TEXT
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.validation import MAX_SEED

STDIN = "-"
MAX_FILE = 2**26  # bytes
WANTED = "a prompt a line, or a JSON object of the request's keys a line"
# What differs between jobs of one shape
CONTENT = (
    *("prompt", "negative_prompt", "conditions", "seed", "num_inference_steps", "sigmas", "fps"),
    *("output", "save_latents", "asked"),
)


class Line(NamedTuple):
    """A line that is not empty, and its number, from 1."""

    number: int
    text: str


@dataclass(frozen=True)
class Shard:
    """The part of the jobs that this worker makes: each `count`th, from job `index` on."""

    index: int = 0
    count: int = 1


def read_lines(source: str) -> Iterator[list[Line]]:
    """The lines of a file at once; those of stdin as they come, together with those that are there already. Raises
    `UsageError` for what is no text."""
    if source == STDIN:
        yield from _read_stdin()
        return
    path = user_path(source)
    try:
        content = read_limited(path, MAX_FILE, WANTED)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check the path") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UsageError(f"{path} is not text in UTF-8", WANTED)
    yield [Line(number, line.strip()) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _read_stdin() -> Iterator[list[Line]]:
    if sys.stdin is None:
        raise UsageError("stdin is closed, and brings no jobs", "producer | ltx2 batch -, or name a file")
    lines, errors = SimpleQueue[Line | None](), list[OSError]()
    Thread(target=_enqueue, args=(lines, errors), daemon=True).start()
    line = lines.get()
    while line:
        ready = [line]
        try:
            while line := lines.get_nowait():
                ready.append(line)
            yield ready
        except Empty:
            yield ready
            line = lines.get()
    if errors:
        raise UsageError(f"stdin cannot be read: {errors[0].strerror}", WANTED)


def _enqueue(lines: "SimpleQueue[Line | None]", errors: list[OSError]) -> None:
    """Read stdin in a thread: it may wait for the next job for ever. At its end come None, and the error if that was
    why."""
    number = 0
    try:
        while text := sys.stdin.buffer.readline(MAX_TEXT + 1):
            number += 1
            end = text
            while len(end) > MAX_TEXT and not end.endswith(b"\n"):  # what is left of a line that is refused
                end = sys.stdin.buffer.readline(MAX_TEXT + 1)
            if text.strip():
                lines.put(Line(number, text.decode("utf-8", errors="surrogateescape").strip()))
    except OSError as error:
        errors.append(error)
    lines.put(None)


def job_values(line: Line) -> dict[str, Any]:
    """The keys of the request in a line: those of a JSON object; other text is the prompt."""
    if len(line.text.encode(errors="surrogateescape")) > MAX_TEXT:
        raise UsageError(f"it has more than {MAX_TEXT:,} bytes", WANTED)
    if not line.text.startswith("{"):
        return {"prompt": line.text}
    try:
        values = json.loads(line.text)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "it is too deep, or has a huge number"
        raise UsageError(f"this is no JSON object: {reason}", WANTED) from None
    return {str(key): value for key, value in values.items()}


def own_seed(values: Mapping[str, Any], num_videos: int) -> int:
    """The seed of a job that has none: the same whenever and wherever the job is started, another for other values."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode(errors="surrogateescape"))
    return int(digest.hexdigest()[:12], 16) % (MAX_SEED - num_videos + 2)


def parse_shard(text: str | None) -> Shard:
    """The shard that I/N names."""
    if text is None:
        return Shard()
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if match is None:
        raise UsageError(f"--shard {text!r} is not I/N", "for example: --shard 0/4, the first of four")
    index, count = map(int, match.groups())
    if index >= count:
        hint = f"nearest: --shard {max(count - 1, 0)}/{max(count, 1)}"
        raise UsageError(f"--shard {text}: shards count from 0, so {index} is not one of {count}", hint)
    return Shard(index, count)


def shape_of(spec: RunSpec) -> str:
    """Equal for requests that differ in their content alone: they run the same programs."""
    shown = [(condition.kind, condition.frame, condition.num_frames) for condition in spec.conditions]
    return repr([shown, *(value for key, value in vars(spec).items() if key not in CONTENT)])


def in_order(shapes: Sequence[int]) -> list[int]:
    """The indices of jobs so that those of one shape follow each other, the shape of the first job first."""
    first = {shape: index for index, shape in reversed(list(enumerate(shapes)))}
    return sorted(range(len(shapes)), key=lambda index: first[shapes[index]])
