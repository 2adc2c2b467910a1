"""Commands and options that are gone, each with its replacement, and old names that are read for one more release."""

from collections.abc import Iterator, Sequence

from ltx2_cli.console import print_error
from ltx2_cli.errors import UsageError

# command, or command and option: what does it now
REMOVED = {
    "config path": "`ltx2 doctor` prints the folders",
    "config show --command": "`ltx2 generate --config FILE` makes the clip of a file or record",
    "lora": "`ltx2 info FILE` describes a LoRA",
    "lora inspect": "`ltx2 info FILE` describes a LoRA; `hf download REPO` fetches one",
    "bench compare": "`ltx2 bench run -o FILE` and --perf-dump write JSON: compare `denoise_steps_ms`",
    "doctor --coordinator-address": "`nc -z HOST PORT` tests a port",
    "upsample --adain": "upsampled latents keep their statistics: leave it out",
    "upsample --tone-map": "upsampled latents keep their range: leave it out",
}
# option before, with its value or after its command where it has the new name only there: option now
RENAMED = {
    "--resumable": "--save-run",
    "--no-resumable": "--no-save-run",
    "--keep-every": "--save-run-every",
    "--checkpoint": "--save-run",
    "--no-checkpoint": "--no-save-run",
    "--checkpoint-every": "--save-run-every",
    "--stop-after stage1": "--draft",
    "--noise": "--init-noise",
    "retake --picture": "--video",
    "retake --sound": "--audio",
}


def check_removed(words: Sequence[str]) -> None:
    """Raise `UsageError` where the words of a command line name a command that is gone."""
    for name in (" ".join(words[:2]), " ".join(words[:1])):
        if name in REMOVED:
            raise UsageError(f"`ltx2 {name}` was removed", REMOVED[name])


def check_removed_option(command: str, flag: str) -> None:
    """Raise `UsageError` where a command had an option that is gone."""
    if hint := REMOVED.get(f"{command} {flag.partition('=')[0]}"):
        raise UsageError(f"{flag.partition('=')[0]} was removed", hint)


def renamed(command: str, words: Sequence[str], known: set[str]) -> Iterator[str]:
    """The words of a command line with new names for old ones, where the command knows the new ones alone; says so."""
    rest = list(words)
    while rest:
        if rest[0] == "--":
            yield from rest
            return
        name, equals, value = rest[0].partition("=")
        whole = " ".join([name, value] if equals else rest[:2])  # an option with its value
        for old in (whole, name) if name not in known else ():
            new = RENAMED.get(f"{command} {old}") or RENAMED.get(old)
            if new in known:
                print_error(f"{old} is now {new}; the next release does not read the old name", "", "note: ")
                yield f"{new}{equals}{value}" if old == name else str(new)
                del rest[: 1 if equals or old == name else 2]
                break
        else:
            yield rest.pop(0)
