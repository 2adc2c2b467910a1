"""Settings of prompts that the text encoder writes."""

from dataclasses import dataclass
from pathlib import Path

from ltx2_cli.errors import UsageError
from ltx2_cli.request.profiles import configs
from ltx2_cli.request.yaml import MAX_TEXT

MOST_TEMPERATURE = 2.0


@dataclass(frozen=True, kw_only=True)
class EnhanceSettings:
    """How the text encoder writes a prompt. Raises `UsageError` for a temperature out of range."""

    instructions: str  # the idea follows them
    temperature: float = 0.0  # 0: the likeliest tokens

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= MOST_TEMPERATURE:
            nearest = min(max(self.temperature, 0.0), MOST_TEMPERATURE)
            problem = f"--enhance-temperature {self.temperature:g} is not from 0 to {MOST_TEMPERATURE:g}"
            raise UsageError(problem, f"nearest: {nearest:g}")


def read_instructions(path: Path | None) -> str:
    """The instructions in a file; None: those of the program. Raises `UsageError` for no text."""
    place = configs() / "enhance" / "instructions.txt" if path is None else path
    try:
        with place.open("rb") as file:
            text = file.read(MAX_TEXT + 1).decode().strip()
    except OSError as error:
        raise UsageError(f"{place} cannot be read: {error.strerror}", "check the path of --enhance-with") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{place} is no text in UTF-8", "instructions in a text file") from error
    if not text or "\0" in text or len(text) > MAX_TEXT:
        raise UsageError(f"{place} has no instructions, or more than {MAX_TEXT:,} bytes", "instructions in a text file")
    return text
