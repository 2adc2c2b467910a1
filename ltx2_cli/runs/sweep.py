"""`ltx2 sweep`: one prompt under varied settings, side by side on a contact sheet."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ltx2_cli.artifacts.files import Output, user_path
from ltx2_cli.artifacts.outputs import read_files, slug
from ltx2_cli.errors import UsageError
from ltx2_cli.media.clip import NO_AUDIO, Media
from ltx2_cli.media.contact_sheet import sheet_content, write_contact_sheet
from ltx2_cli.media.probe import open_video
from ltx2_cli.media.videos import read_video
from ltx2_cli.request.layers import ALL_KEYS, unknown_name_error
from ltx2_cli.request.size import SIZE_SHORTHANDS
from ltx2_cli.request.spelling import NAMES, typed
from ltx2_cli.request.validation import CLIP_TYPES, MAX_VIDEOS
from ltx2_cli.request.yaml import parse
from ltx2_cli.runs.batch import check_image_outputs, finish_jobs, make_jobs
from ltx2_cli.runs.job_lines import Line
from ltx2_cli.runs.job_order import own_seed
from ltx2_cli.runs.jobs import DONE, SKIPPED, BatchSettings, Jobs
from ltx2_cli.runs.session import Session

VARY_EXAMPLE = "for example: --vary guidance_scale=2,3,4"


class Varied(NamedTuple):
    """A key of the request, as typed, and its values."""

    name: str
    values: Sequence[Any]


def sweep(session: Session, settings: BatchSettings, vary: Sequence[str], sheet_path: Path | None) -> None:
    """Make a clip for each combination, and a contact sheet of all existing ones at `sheet_path`."""
    jobs = Jobs(session, settings)
    base = jobs.request({})
    seeds = base.seed or (own_seed({"prompt": base.prompt}, base.num_videos),)
    varied = [*map(parse_varied, vary), Varied("seed", seeds)]
    refuse_repeated_keys(varied)
    count = prod(len(each.values) for each in varied)
    if count == 1 or count > MAX_VIDEOS:
        raise UsageError(f"{count} of 2 to {MAX_VIDEOS} clips are asked for", VARY_EXAMPLE)
    place = Path(base.base_output_directory or "", slug(base.prompt) or "sweep")
    sheet = user_path(sheet_path or place.with_name(f"{place.name}-sweep.png"))
    if sheet.suffix.lower() != ".png":  # nor is it a clip, its record or its latents then
        raise UsageError(f"--sheet {sheet} is not a PNG", f"nearest: --sheet {sheet.with_suffix('.png')}")
    content = json.dumps({"prompt": base.prompt, "clips": [*_combinations(varied)]}, default=str)
    own = _shows_all(content, sheet_content(sheet))
    check_image_outputs(session, settings, read_files(base, *settings.reads), Output(sheet, "--sheet"), own)
    kind = CLIP_TYPES[base.running.video]
    started = make_jobs(
        jobs, [list(_lines(varied, None if settings.names else place.with_name(f"{place.name}.{kind}")))]
    )
    if jobs.counts[DONE] or not (session.dry_run or sheet.exists()):
        _write_sheet(jobs, varied, sheet, content)
    finish_jobs(jobs, started)


def parse_varied(text: str) -> Varied:
    """The key and the values of KEY=VALUE,VALUE... Raises `UsageError` for other text."""
    name, equals, values = text.partition("=")
    try:
        parsed = parse(f"[{values}]") if equals else []
    except yaml.YAMLError:
        parsed = []
    if not parsed or not name:
        raise UsageError(f"--vary {text!r} is not KEY=VALUE,VALUE...", VARY_EXAMPLE)
    name = name.replace("-", "_")
    if name not in (known := [*SIZE_SHORTHANDS, *NAMES]) and "." not in name:
        raise unknown_name_error("option", name, known, f"; {ALL_KEYS}", "--vary: ")
    return Varied(name, parsed)


def refuse_repeated_keys(varied: Sequence[Varied]) -> None:
    """Raise `UsageError` for a key that varies twice: only its last values would count."""
    for name, times in Counter(NAMES.get(each.name, each.name) for each in varied).items():
        if times > 1:
            hint = typed("seed", "0..3") if name == "seed" else f"--vary {name}=VALUE,VALUE... with all values"
            raise UsageError(f"--vary: {name} is given {times} times", hint)


def _combinations(varied: Sequence[Varied]) -> Iterator[dict[str, Any]]:
    for values in product(*(each.values for each in varied)):
        yield dict(zip([each.name for each in varied], values, strict=True))


def _lines(varied: Sequence[Varied], place: Path | None) -> Iterator[Line]:
    """A job for each combination; with a `place`, named after the varied values."""
    for number, combination in enumerate(_combinations(varied), 1):
        values = {NAMES.get(name, name): value for name, value in combination.items()}
        parts = [f"{name}-{_name_part(value)}" for name, value in combination.items()]
        named = {"output": str(place.with_name("-".join([place.stem, *parts]) + place.suffix))} if place else {}
        yield Line(number, json.dumps({**values, **named}))


def _name_part(value: object) -> str:
    """A value as a part of a file name."""
    return re.sub(r"[^\w.-]+", "-", str(value).strip("[]{}'\" ")).strip(".") or "none"


def _shows_all(content: str, of_sheet: str | None) -> bool:
    """Whether these clips include all of an existing sheet of the same sweep."""
    try:
        new, old = json.loads(content), json.loads(of_sheet or "")
        return old["prompt"] == new["prompt"] and all(clip in new["clips"] for clip in old["clips"])
    except (ValueError, KeyError, TypeError):
        return False


def _write_sheet(jobs: Jobs, varied: Sequence[Varied], sheet: Path, content: str) -> None:
    """Write the existing clips in the order of their lines, with their varied values as captions."""
    captions = [
        ", ".join(f"{each.name} {combination[each.name]}" for each in varied if len(each.values) > 1)
        for combination in _combinations(varied)
    ]
    made = (result for result in jobs.results if result.status in (DONE, SKIPPED))
    results = sorted(made, key=lambda result: result.line)
    clips = [(captions[result.line - 1], Path(clip)) for result in results for clip in result.clips]
    if there := [(caption, clip) for caption, clip in clips if clip.suffix == ".mp4" and clip.exists()]:
        write_contact_sheet(((caption, _read(clip)) for caption, clip in there), sheet, content)
        jobs.session.report.note(f"side by side: {sheet}")


def _read(clip: Path) -> Media:
    file = open_video(clip)
    return Media(read_video(clip, file.fps, file.num_frames, from_end=False).frames, NO_AUDIO, file.fps, 1)
