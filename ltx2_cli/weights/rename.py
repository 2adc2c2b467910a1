"""Names of tensors in the original single files, from the names that are declared here.

The way back needs no rules: it is the same table of names, read from the other side.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Renaming:
    """One network in a single file: what its names begin with there, and pairs of fragments, ours and theirs.

    A fragment is one or more elements of a path. At each place the longest that fits is exchanged; the rest stays.
    """

    prefix: str
    fragments: tuple[tuple[str, str], ...]

    def originals(self, names: Iterable[str]) -> dict[str, str]:
        """The names that declared tensors have in a single file; raises `ValueError` where two would share one."""
        table = {name: self._original(name) for name in names}
        if len(set(table.values())) < len(table):
            raise ValueError(f"two tensors below `{self.prefix}` have the same original name")
        return table

    def _original(self, name: str) -> str:
        table, elements, done, exchanged = dict(self.fragments), name.split("."), 0, []
        while done < len(elements):
            rest = (".".join(elements[done:end]) for end in range(len(elements), done, -1))
            fragment = next((each for each in rest if each in table), None)
            exchanged.append(elements[done] if fragment is None else table[fragment])
            done += 1 if fragment is None else fragment.count(".") + 1
        return self.prefix + ".".join(exchanged)
