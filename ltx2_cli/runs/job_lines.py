"""The lines of a file of jobs or of a pipe, without comments. Lines that cannot be jobs are refused."""

import json
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import fields
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any, NamedTuple

from ltx2_cli.artifacts.files import read_limited, user_path
from ltx2_cli.errors import UsageError
from ltx2_cli.request.size import SIZE_SHORTHANDS
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.yaml import MAX_DEPTH, MAX_TEXT

STDIN = "-"
MAX_FILE = 2**26  # bytes
MOST_READY = 100  # lines read ahead from a pipe
WANTED_JOBS = "a prompt or a JSON object of the request's keys a line, or a JSON array of such"
COMMENT_MARK = "#"
LINE_END = re.compile(r"\r\n|\r|\n")
WHITESPACE = re.compile(r"[ \t\r\n]*")
JSON_TEXT = re.compile(r'"(?:\\.|[^"\\])*"(?P<rest>.*)', re.DOTALL)
JSON_VALUE = re.compile(r"(null|true|false|-?\d+(\.\d+)?([eE][-+]?\d+)?),?")
YAML_ITEM = re.compile(r"-(\s+(?P<item>.*)|-*$)|\.\.\.$")
YAML_PAIR = re.compile(r"(?P<key>\w+)\s*:(\s+(?P<value>.*)|$)")
NO_PROMPT = ("[", "]", "}", "```", "//", "/*")  # no prompt begins so, except as JSON
JOB_KEYS = {*(field.name for field in fields(RunSpec)), *SIZE_SHORTHANDS, "steps"}
JOB_EXAMPLE = '{"prompt": "a fox yawns", "seed": 7}'
LONGEST_EXAMPLE = 60  # characters of a line in a hint


class Line(NamedTuple):
    """A line that is neither empty nor a comment, or an item of a JSON array, and its number, from 1."""

    number: int
    text: str
    unit: str = "line"


def read_lines(source: str) -> Iterator[list[Line]]:
    """All lines of a file at once; lines of stdin as they arrive, with all that are ready. Raises `UsageError` for
    binary content."""
    if source == STDIN:
        yield from _read_stdin()
        return
    text = _read_text(path := user_path(source))
    lines = [Line(number, line) for number, each in enumerate(LINE_END.split(text), 1) if (line := _content(each))]
    if not (lines and lines[0].text.startswith("[")):
        yield lines
        return
    try:
        yield [*_items(text, text.index(lines[0].text))]
    except json.JSONDecodeError as error:
        hint = f"{WANTED_JOBS}; a prompt that begins so is given as JSON: {_as_json(lines[0].text)}"
        raise UsageError(f"{path}, line {error.lineno}: this is no JSON array: {error.msg}", hint) from None
    except RecursionError:
        raise UsageError(f"{path} is no JSON array of jobs: it is nested too deep", WANTED_JOBS) from None


def _read_text(path: Path) -> str:
    try:
        text = read_limited(path, MAX_FILE, WANTED_JOBS).decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check the path") from None
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UsageError(f"{path} is not text in UTF-8", WANTED_JOBS)
    return text


def _content(line: str) -> str:
    """A line without surrounding space; empty for a comment."""
    text = line.strip().removeprefix("\ufeff").strip()
    return "" if text.startswith(COMMENT_MARK) else text


def _items(text: str, start: int) -> Iterator[Line]:
    """The items of the JSON array that begins at `start`. Raises `JSONDecodeError` for other text."""
    decoder, number, place = json.JSONDecoder(), 0, _skip_space(text, start + 1)
    closed = text.startswith("]", place)
    while not closed:
        _, end = decoder.raw_decode(text, place)
        number += 1
        yield Line(number, text[place:end], "item")
        place = _skip_space(text, end)
        closed = text.startswith("]", place)
        if not closed and not text.startswith(",", place):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, place)
        place = place if closed else _skip_space(text, place + 1)
    if (end := _skip_space(text, place + 1)) < len(text):
        raise json.JSONDecodeError("Extra data", text, end)


def _skip_space(text: str, place: int) -> int:
    match = WHITESPACE.match(text, place)
    return match.end() if match else place


def _read_stdin() -> Iterator[list[Line]]:
    if sys.stdin is None:
        raise UsageError("stdin is closed, and brings no jobs", "producer | ltx2 batch -, or name a file")
    lines, errors = Queue[Line | None](MOST_READY), list[OSError]()
    Thread(target=_enqueue, args=(lines, errors), daemon=True).start()
    line = lines.get()
    while line:
        ready = [line]
        try:
            while len(ready) < MOST_READY and (line := lines.get_nowait()):
                ready.append(line)
            yield ready
            line = line and lines.get()
        except Empty:
            yield ready
            line = lines.get()
    if errors:
        raise UsageError(f"stdin cannot be read: {errors[0].strerror}", WANTED_JOBS)


def _enqueue(lines: "Queue[Line | None]", errors: list[OSError]) -> None:
    """Read stdin in a thread: the next job may never arrive. The last items are None, and the error if there was
    one."""
    number = 0
    try:
        while text := sys.stdin.buffer.readline(MAX_TEXT + 1):
            number += 1
            end = text
            while len(end) > MAX_TEXT and not end.endswith(b"\n"):  # the rest of a refused line
                end = sys.stdin.buffer.readline(MAX_TEXT + 1)
            if line := _content(text.decode("utf-8", errors="surrogateescape")):
                lines.put(Line(number, line))
    except OSError as error:
        errors.append(error)
    lines.put(None)


def job_values(line: Line) -> dict[str, Any]:
    """The values of the request in a line: a JSON object; other text is the prompt. Raises `UsageError` for a line that
    cannot be either."""
    text = line.text
    if len(text.encode(errors="surrogateescape")) > MAX_TEXT:
        raise UsageError(f"it has more than {MAX_TEXT:,} bytes", WANTED_JOBS)
    if text.startswith("{"):
        return read_object(text)
    if quoted := JSON_TEXT.fullmatch(text):
        return _quoted(text, quoted["rest"])
    _check_prompt(text)
    return {"prompt": text}


def read_object(text: str) -> dict[str, Any]:
    """The values of a JSON object. Raises `UsageError` for anything else, also for one that is nested too deep."""
    try:
        values = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "it is too deep, or has a huge number"
        raise UsageError(f"this is no JSON object: {reason}", WANTED_JOBS) from None
    level: list[Any] = [values]
    for _ in range(MAX_DEPTH):
        level = [part for item in level for part in _parts(item)]
    if level:
        raise UsageError(f"its values are nested more than {MAX_DEPTH} deep", WANTED_JOBS)
    return values


def _parts(value: Any) -> Collection[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs. Raises `UsageError` for a repeated key."""
    values = dict(pairs)
    if len(values) < len(pairs):
        key = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise UsageError(f"the key `{key}` is there twice", f"leave one of the two `{key}` out")
    return values


def _quoted(text: str, rest: str) -> dict[str, Any]:
    """The values of a line that begins with a JSON string: the string is the prompt, or, if more follows, the whole
    line with its quotes. Raises `UsageError` for a part of an object or an array."""
    begun = text.removesuffix(rest)
    if rest.strip() == ",":
        raise UsageError("this is an item of a JSON array that is not whole", f"without the comma: {_cut(begun)}")
    if rest.lstrip().startswith(":"):
        raise UsageError("this is a part of a JSON object, which is one line", f"for example: {JOB_EXAMPLE}")
    try:
        return {"prompt": text if rest else json.loads(begun)}
    except ValueError:  # an escape that JSON has not
        return {"prompt": text}


def _check_prompt(text: str) -> None:
    """Raise `UsageError` for a line that cannot be a prompt, with the nearest right form."""
    pair, item = YAML_PAIR.fullmatch(text), YAML_ITEM.fullmatch(text)
    if text.startswith(NO_PROMPT) or JSON_VALUE.fullmatch(text):
        raise UsageError(f"`{_cut(text)}` is no prompt and no JSON object", f"a prompt like this: {_as_json(text)}")
    if item:
        within = YAML_PAIR.fullmatch(item["item"] or "")
        meant = _as_json(within["value"] or "") if within and within["key"] == "prompt" else _cut(item["item"] or "")
        hint = f"nearest: {meant}" if meant else "leave the line out"
        raise UsageError("this is YAML, and jobs are prompts or JSON", f"{hint}; a prompt like this: {_as_json(text)}")
    if pair and pair["key"] in JOB_KEYS:
        nearest = _as_json(pair["value"] or "") if pair["key"] == "prompt" else JOB_EXAMPLE
        raise UsageError(
            f"`{pair['key']}:` is a key of a request, and jobs are prompts or JSON",
            f"nearest: {nearest}; a prompt like this: {_as_json(text)}",
        )


def _as_json(prompt: str) -> str:
    """A prompt as a JSON object, ready to be copied if it is short."""
    return json.dumps({"prompt": _cut(prompt)}, ensure_ascii=False)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_EXAMPLE else f"{text[:LONGEST_EXAMPLE]}…"
