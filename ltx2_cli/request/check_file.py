"""All problems of a settings file at once, each with its line."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ltx2_cli.errors import UsageError
from ltx2_cli.request.layers import ASKED, ConfigLayer, flatten_valid
from ltx2_cli.request.profiles import CACHE, PROFILE_KEYS, PROVENANCE, build_spec, merge_layers, profile_layers
from ltx2_cli.request.validation import Problem, spec_problems
from ltx2_cli.request.yaml import Values


def file_problems(page: ConfigLayer) -> tuple[Values, list[Problem]]:
    """The valid values of a file, and all problems with their keys: unknown keys, wrong types, unknown profiles, and
    those of `validate` on keys of the file."""
    own = {key: value for key, value in page.values.items() if key not in (ASKED, PROVENANCE)}
    values, errors = flatten_valid(ConfigLayer("", own))
    problems = [(key, _sentence(error)) for key, error in errors.items()]
    if not errors:
        try:
            merge_layers({}, replace(page, source=""))
        except UsageError as error:
            problems.append((CACHE, _sentence(error)))
    unknown = list(_unknown_profiles(values))
    known = {key: value for key, value in values.items() if key not in dict(unknown)}
    open_prompt = {"prompt"} if not known.get("prompt") else set()  # left to the command line
    wrong = [(key, text) for key, text in spec_problems(build_spec(known)) if key in known.keys() - open_prompt]
    return values, [*problems, *unknown, *wrong]


def with_lines(source: str, problems: list[Problem], lines: Mapping[str, int]) -> list[str]:
    """One sentence for each problem, with `source` and, if `lines` has its key or a section above, the line; in the
    order of lines."""
    numbered = []
    for key, sentence in problems:
        while key not in lines and "." in key:  # a profile that is named by its section
            key = key.rpartition(".")[0]
        numbered.append((lines.get(key, 0), sentence))
    return [f"{source}{f', line {line}' if line else ''}: {sentence}" for line, sentence in sorted(numbered)]


def _unknown_profiles(values: Values) -> Iterator[Problem]:
    for key in PROFILE_KEYS.values():
        if key in values:
            try:
                profile_layers({key: values[key]})
            except UsageError as error:
                yield key, _sentence(error)


def _sentence(error: UsageError) -> str:
    """The error in one sentence, without the list of all keys."""
    enough = "unknown key" in str(error) or "; closest: " in str(error)
    return str(error) if enough else f"{error}; {error.hint}"
