"""The commands, as each file of `commands` registers its own, and their options as typer and messages read them."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, cleandoc, get_annotations
from typing import Any, TypeVar, get_args

from typer.models import OptionInfo

from ltx2_cli.cli.options import METAVARS, PANELS, Options
from ltx2_cli.request.spelling import NAMES, PARTS, Spelling

MAKE, CONTINUE, INSPECT, SET_UP = "Make", "Edit and continue", "Inspect and plan", "Set up and measure"
COMMAND_PANELS = (MAKE, CONTINUE, INSPECT, SET_UP)  # in their order in `ltx2 --help`
COMMAND_GROUPS = {"bench": "Measure steps on this machine.", "config": "Print and check settings."}
FIRST_COMMAND = "generate"  # of its panel; the others follow by name
T = TypeVar("T", bound=type)


@dataclass(frozen=True)
class Command:
    """A command: its name as it is typed, such as `config show`, and the class of its options, which runs it."""

    name: str
    panel: str
    options: Any

    @property
    def help(self) -> str:
        """One or two sentences."""
        return cleandoc(self.options.__doc__).partition("\n\n")[0]

    @property
    def examples(self) -> list[str]:
        """Command lines."""
        return cleandoc(self.options.__doc__).partition("\n\n")[2].splitlines()

    @property
    def first_example(self) -> str:
        """The first example of the command itself."""
        return next(line for line in self.examples if line.startswith(f"ltx2 {self.name}"))

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Options and arguments by the name of their field, in their order in the help."""
        return parameters(self.options)

    @property
    def requires_words(self) -> bool:
        """Whether it needs more than its name."""
        return any(parameter.default is Parameter.empty for parameter in self.parameters.values())


COMMANDS = dict[str, Command]()


def command(name: str, panel: str) -> Callable[[T], T]:
    """Register a dataclass of options as a command. Its docstring is the help: a sentence or two, an empty line, and an
    example a line. Its method `run` is called with a `Session` if it is one of `SessionOptions`."""

    def register(options: T) -> T:
        COMMANDS[name] = Command(name, panel, options)
        return options

    return register


def all_commands() -> list[Command]:
    """All commands in the order of `ltx2 --help`."""
    return sorted(
        COMMANDS.values(), key=lambda one: (COMMAND_PANELS.index(one.panel), one.name != FIRST_COMMAND, one.name)
    )


def parameters(options: type) -> dict[str, Parameter]:
    """The fields of a class of options, its own before its bases', panel by panel. A flag without a name of its own is
    called like its field."""
    found = dict[str, Parameter]()
    for name, kind in ((name, kind) for part in options.__mro__ for name, kind in get_annotations(part).items()):
        if name not in found:
            info, default = option_of(kind), getattr(options, name, Parameter.empty)
            info.metavar = info.metavar or METAVARS.get(get_args(kind)[0])
            if isinstance(info, OptionInfo) and get_args(kind)[0] is bool and not info.param_decls:
                info.param_decls = (long_name(name),)
            found[name] = Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
    return dict(sorted(found.items(), key=lambda item: PANELS.index(option_of(item[1].annotation).rich_help_panel)))


def option_of(kind: Any) -> Any:
    """The option or argument in an `Annotated` type."""
    return get_args(kind)[1]


def long_name(field: str) -> str:
    """`--num-frames` of `num_frames`."""
    return f"--{field.replace('_', '-')}"


def spelling_of(options: type[Options]) -> Spelling:
    """How messages spell values for a command with these options."""
    fields = parameters(options)
    flags = {
        key: min(option_of(fields[name].annotation).param_decls or [long_name(name)], key=len)
        for name, key in (NAMES | PARTS).items()
        if name in fields
    }
    return Spelling(flags, options.FIXED if "settings" in fields else None)


def typed_command() -> tuple[list[str], Command | None]:
    """The words that were typed for a command, or for a group alone, and the command."""
    for words in (sys.argv[1:3], sys.argv[1:2]):
        if found := COMMANDS.get(" ".join(words)):
            return words, found
    return [word for word in sys.argv[1:2] if word in COMMAND_GROUPS], None


def names_below(words: list[str]) -> Mapping[str, None]:
    """Possible next words: commands and groups, or the commands of a group."""
    names = (one.name.split() for one in all_commands())
    return dict.fromkeys(name[len(words)] for name in names if name[: len(words)] == words != name)
