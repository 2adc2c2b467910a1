"""Typer's commands: a second value of an option is refused, former names of options are read, and help shows no
Python types. Some arguments are of classes that typer does not export."""

import shlex
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from ltx2_cli.cli.names import ALIASES
from ltx2_cli.cli.removed import check_removed_option, renamed
from ltx2_cli.errors import UsageError

HELP = {"--help", "-h"}


class StrictCommand(TyperCommand):
    """A command that knows the `ALIASES` of its options, and refuses a second value of one that takes one; typer drops
    the first."""

    def make_parser(self, ctx: Any, action: str = "store") -> Any:
        """A parser that does with options of one value as `action` says."""
        parser = super().make_parser(ctx)
        for option in self.params:
            if isinstance(option, TyperOption) and not option.is_flag:
                names = [*option.opts, *ALIASES.get(option.opts[0], ())]
                parser.add_option(option, names, option.name, "append" if option.multiple else action)
        return parser

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises `UsageError` for an option with two values, and for one that is gone."""
        if not ctx.resilient_parsing:  # as for completion
            options = [parameter for parameter in self.params if isinstance(parameter, TyperOption)]
            command = ctx.command_path.partition(" ")[2]
            known = {name for option in options for name in (*option.opts, *option.secondary_opts)}
            args = [*renamed(command, args, known)]
            try:
                self._check_single(ctx, args, options)
            except typer.TyperException as error:
                if HELP & {*args}:  # is asked for, whatever else is
                    args = ["--help"]
                elif flag := getattr(error, "option_name", None):  # of an unknown one; typer does not export its class
                    check_removed_option(command, flag)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        hide_types(self.get_params(ctx))
        show_defaults(self.params, any(parameter.name in NEW_CLIP for parameter in self.params))
        super().format_help(ctx, formatter)

    def _check_single(self, ctx: Any, args: list[str], options: list[TyperOption]) -> None:
        values_by_name, _, _ = self.make_parser(ctx, "append").parse_args(list(args))
        for option in (option for option in options if not (option.is_flag or option.multiple)):
            flag, values = option.opts[0], values_by_name.get(option.name, [])
            if len(values) > 1:
                several = flag == "--seed" and option.type_descriptor.annotation is str  # 7, or 1,2,3
                value = ",".join(values) if several else values[-1]
                raise UsageError(f"{flag} is given {len(values)} times: {', '.join(values)}", shlex.join([flag, value]))


NEW_CLIP = ("duration", "enhance_with")  # options of commands that go on from no record


class PlainGroup(TyperGroup):
    """A group of commands, whose help shows no Python types."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        hide_types(self.get_params(ctx))
        super().format_help(ctx, formatter)


def show_defaults(parameters: Sequence[Any], new_clip: bool) -> None:
    """Add the defaults to the help of options that name none: the profiles' values for a new clip, else the record."""
    from ltx2_cli.cli.defaults import default_texts

    texts = default_texts()
    for parameter in (parameter for parameter in parameters if parameter.name in texts):
        text = parameter.type_descriptor.parameter_info.help
        of_profile = new_clip or parameter.name == "sharding"  # chosen for the devices, also with a record
        default = texts[parameter.name] if of_profile else "[default: as recorded]"
        if "default: " not in text:
            parameter.help = f"{text} {default.replace('[', chr(92) + '[')}"


def hide_types(parameters: Sequence[Any]) -> None:
    """Show no type of an argument or a flag, such as `<list[str]>` or `<bool>`."""
    for parameter in parameters:
        if isinstance(parameter, TyperArgument):
            parameter.display_type_rich = lambda ctx: ""  # type: ignore[method-assign]
        elif isinstance(parameter, TyperOption) and parameter.is_flag:
            parameter.metavar = " "
