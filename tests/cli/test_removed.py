"""Commands and options that are gone say what does it now; old names of options are read, with a note."""

from typing import Any

import pytest

from ltx2_cli.cli.app import ltx2_command
from ltx2_cli.cli.registry import COMMANDS
from ltx2_cli.cli.removed import REMOVED, RENAMED
from program import run_program

CLIP = ["clip.mp4"]
WORDS = {  # that a command needs
    "batch": ["jobs.txt"],
    "extend": [*CLIP, "--seconds", "1"],
    "replay": CLIP,
    "resume": ["clip.run"],
    "retake": [*CLIP, "--from", "0", "--to", "1"],
    "upsample": ["latents.safetensors"],
}
VALUES = {"--keep-every": ["5"], "--checkpoint-every": ["5"], "--noise": ["FILE"]}


@pytest.mark.parametrize("gone", REMOVED)
def test_what_is_gone_is_refused_with_what_does_it_now(
    gone: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = gone if "--" not in gone else gone[gone.index("--") :]
    for words in (gone.split(), [*gone.split(), "value"]):
        assert run_program(monkeypatch, *words) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.splitlines() == [
            f"error: {name if '--' in gone else f'`ltx2 {name}`'} was removed",
            f"hint: {REMOVED[gone]}",
        ]


def found(command: str) -> Any:
    """A command as the parser knows it."""
    place: Any = ltx2_command()
    for word in command.split():
        place = place.commands[word]
    return place


def names(command: str) -> set[str]:
    """The names of a command's options."""
    return {name for each in found(command).params for name in (*each.opts, *each.secondary_opts)}


def parsed(command: str, *words: str) -> dict[str, Any]:
    """The values of a command's options, from the words behind its name."""
    return dict(found(command).make_context(f"ltx2 {command}", [*WORDS.get(command, []), *words]).params)


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_is_read_as_the_new_one(old: str, capsys: pytest.CaptureFixture[str]) -> None:
    only, hyphens, name = old.partition("--")
    option, new = hyphens + name, RENAMED[old]
    words, value = option.split(), VALUES.get(option, [])
    knowing = [each for each in COMMANDS if only.strip() in ("", each) and new in names(each)]
    assert knowing
    for command in knowing:
        wanted = parsed(command, new, *value)
        assert capsys.readouterr().err == ""
        joined = "=".join([*words, *value])
        for typed in ([*words, *value], [joined]):
            assert parsed(command, *typed) == wanted
            (note,) = capsys.readouterr().err.splitlines()
            assert note.startswith(f"note: {option} is now {new};")


def test_an_old_name_is_read_by_no_other_command_and_not_behind_two_hyphens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(monkeypatch, "generate", "a fox", "--picture", "fox.png") == 2
    assert "note: " not in (err := capsys.readouterr().err)
    assert "No such option: --picture" in err
    assert parsed("generate", "--", "--noise")["words"] == ["--noise"]
    assert capsys.readouterr().err == ""
