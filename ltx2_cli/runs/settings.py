"""Settings of runs that are not part of their requests."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ltx2_cli.errors import UsageError

if TYPE_CHECKING:
    from ltx2_cli.runs.enhance_settings import EnhanceSettings

SAVE_EVERY = 60.0  # seconds between two saves of an unfinished run


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of a run that are not part of its request. Raises `UsageError` for contradictory settings."""

    save_run: bool | None = None  # save an unfinished run; None: if it takes over a minute
    save_run_every: float = SAVE_EVERY
    preview: Path | None = None
    no_compile: bool = False  # fail for a program that is not in the cache
    warmup: bool = False  # one step and no clip
    perf_dump: Path | None = None
    profile: Path | None = None  # folder for a trace
    auto_duration: bool = False  # the prompt says how long the clip is, by the duration head
    enhancement: "EnhanceSettings | None" = None  # the text encoder writes the prompt

    def __post_init__(self) -> None:
        if self.warmup and self.no_compile:
            raise UsageError("--warmup compiles what --no-compile forbids", "leave one of them out")
        if self.warmup and self.preview:
            raise UsageError("--warmup makes no clip that --preview could show", "leave one of them out")
        if self.warmup and self.auto_duration:
            raise UsageError("--warmup compiles for one length, which auto is not", "a length: --duration 5s")
