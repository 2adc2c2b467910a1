"""Sections of the config in a single file's metadata, read or refused by name.

Key names are those of the files. A default is what leaving the key out means: older files lack the newer keys. A key
that every release states has none: a file without it is refused, as is every value that is not implemented.
"""

from collections.abc import Iterable
from dataclasses import MISSING, asdict, fields
from typing import TypeVar

from ltx2_cli.models.config import Config, NetworkArch, read_arch
from ltx2_cli.spec import SpecError

N = TypeVar("N", bound=NetworkArch)

HINT = "name another checkpoint: --model FOLDER or --model REPOSITORY"


def section_of(config: Config, where: str, *path: str) -> Config:
    """The section of `config` at the end of `path`; raises `SpecError` where there is none."""
    for depth, key in enumerate(path, start=1):
        inner = config.get(key)
        if not isinstance(inner, dict):
            raise SpecError(f"{where}: the config has no section {'.'.join(path[:depth])}", HINT)
        config = inner
    return config


def described(kind: type[N], section: Config, where: str) -> N:
    """What `section` describes; `where` names it in errors."""
    lacking = [field.name for field in fields(kind) if field.default is MISSING and section.get(field.name) is None]
    if lacking:
        raise SpecError(f"{where}: the config lacks {', '.join(lacking)}", HINT)
    return read_arch(kind, section, where)


def same(section: NetworkArch, kind: type[NetworkArch]) -> Config:
    """The fields of `section` that are called the same in `kind`."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in asdict(section).items() if name in names}


def refuse(problems: Iterable[str], where: str) -> None:
    """Raise `SpecError` if there are any."""
    found = "; ".join(problems)
    if found:
        raise SpecError(f"{where}: this model is not implemented: {found}", HINT)
