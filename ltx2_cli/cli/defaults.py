"""Defaults of options in the help, as the profiles have them."""

from typing import Any

from ltx2_cli.request.profiles import PROFILE_KEYS, profile_layers
from ltx2_cli.request.spelling import NAMES

VARIANTS: dict[
    str, dict[str, Any]
] = {  # each by the values that choose it; the first is that of a request that chooses nothing
    "default": {},
    "ltx2.3": {"model": "ltx2.3"},
    "demo": {"model": "demo"},
    "distilled": {"recipe": "distilled"},
}
LONGEST = 24  # characters of a text


def default_texts() -> dict[str, str]:
    """By the name of an option, `[default: 40; demo: 20]`: its value without a word, and other values of variants."""
    variants = {}
    for name, asked in VARIANTS.items():
        layers = profile_layers(asked).values()
        variants[name] = {key: value for layer in layers for key, value in layer.items()} | asked
    texts = {}
    for name, key in NAMES.items():
        key = PROFILE_KEYS.get(name, key)
        shown = {
            variant: _text(values.get(key)) for variant, values in variants.items() if key not in VARIANTS[variant]
        }
        first = shown["default"]
        others = [
            f"{variant}: {text}"
            for variant, text in shown.items()
            if text not in (first, "") and key not in VARIANTS[variant]
        ]
        if first:
            texts[name] = f"[{'; '.join([f'default: {first}', *others])}]"
    return texts


def _text(value: Any) -> str:
    """A value as it is typed; nothing for none."""
    if value in (None, "", ()):
        return ""
    text = (
        ",".join(map(str, value))
        if isinstance(value, tuple)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
