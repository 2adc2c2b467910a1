"""How runs are carried out, beside their requests."""

from dataclasses import dataclass
from pathlib import Path

from ltx2_cli.errors import UsageError

SAVE_EVERY = 60.0  # seconds between two savings of an unfinished run


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How a run is carried out, beside its request. Raises `UsageError` for settings that contradict each other."""

    save_run: bool | None = None  # whether an unfinished run is kept; None: if it takes over a minute
    save_run_every: float = SAVE_EVERY
    preview: Path | None = None
    no_compile: bool = False  # programs that are not in the cache are refused
    warmup: bool = False  # one step and no clip
    perf_dump: Path | None = None
    profile: Path | None = None  # folder for a trace

    def __post_init__(self) -> None:
        if self.warmup and self.no_compile:
            raise UsageError("--warmup compiles what --no-compile forbids", "leave one of them out")
        if self.warmup and self.preview:
            raise UsageError("--warmup makes no clip that --preview could show", "leave one of them out")
