"""Options as the values of a request by their keys, and as settings of a run."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from ltx2_cli.artifacts.files import user_path
from ltx2_cli.cli.options import BatchOptions, ConfigOptions, EnhanceOptions, Options
from ltx2_cli.errors import UsageError
from ltx2_cli.request.size import SIZE_SHORTHANDS
from ltx2_cli.request.spelling import NAMES, of_condition
from ltx2_cli.request.yaml import MAX_TEXT
from ltx2_cli.runs.build_request import Layers, config_page
from ltx2_cli.runs.enhance_settings import EnhanceSettings, read_instructions
from ltx2_cli.runs.job_lines import STDIN
from ltx2_cli.runs.jobs import BatchSettings
from ltx2_cli.runs.settings import RunSettings

FILE_AT_FRAME = re.compile(r"(?P<path>.+?)(@(?P<frame>-?\d{1,9}))?(:(?P<strength>-?\d*\.?\d+))?", re.DOTALL)
CONDITIONS = {  # by their kind
    "image": FILE_AT_FRAME,
    "video": FILE_AT_FRAME,
    "reference": re.compile(r"(?P<path>.+?)(:(?P<strength>-?\d*\.?\d+))?", re.DOTALL),
    "mask": re.compile(r"(?P<path>.+)", re.DOTALL),
}
NUMBER_LISTS = (  # keys of values that are typed with commas
    ("stg_blocks", int, "a list of blocks", "--stg-blocks 0,1; no STG: --stg-scale 0"),
    ("guidance_interval", float, "two noise levels", "--guidance-interval 0.2,0.9"),
)
SEEDS = re.compile(r"\d+(\.\.\d+)?,?")
WEIGHTS_PATH = re.compile(r"(?!\S*\.[A-Za-z]\w+$)(~|\.{0,2})/\S+|\S+\.safetensors")


def overrides(options: Options, **others: object) -> dict[str, object]:
    """The options that were given, by their keys in the `RunSpec`. `others` take their place."""
    values = {**vars(options), **others}
    given = {NAMES[name]: value for name, value in values.items() if name in NAMES and value not in (None, [], ())}
    for key, number, kind, hint in NUMBER_LISTS:
        if isinstance(text := given.get(key), str):
            try:
                given[key] = [number(part) for part in text.split(",")]
            except ValueError:
                raise UsageError(f"{key} {text!r} is not {kind}", f"for example: {hint}") from None
    shown = [(kind, text) for kind in ("image", "video", "reference") for text in values.get(kind) or ()]
    shown += [("mask", mask)] if (mask := values.get("reference_mask")) is not None else []
    given |= {"conditions": [parse_condition(*condition) for condition in shown]} if shown else {}
    alone = [stream for name, stream in (("no_video", "audio"), ("no_audio", "video")) if values.get(name)]
    if len(alone) > 1:
        raise UsageError("--no-video and --no-audio leave nothing to make", "leave one of them out")
    given |= {"streams": alone[0]} if alone else {}
    return {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}


def parse_condition(kind: str, text: str) -> dict[str, object]:
    """The condition that FILE[@FRAME][:STRENGTH] means, or of a reference FILE[:STRENGTH] and of a mask FILE, by its
    keys. Raises `UsageError` for no text at all."""
    match = CONDITIONS[kind].fullmatch(text)
    if match is None:
        written = {"reference": "FILE[:STRENGTH]", "mask": "FILE"}.get(kind, "FILE[@FRAME][:STRENGTH]")
        example = "for example: --image end.png@-1:0.8 --reference pose.mp4:0.8"
        raise UsageError(f"{of_condition(kind, repr(text))} is not {written}", example)
    return {"kind": kind, **{name: value for name, value in match.groupdict().items() if value is not None}}


def prompt_and_seeds(prompt: str | None, seed: str | None, words: Sequence[str] | None) -> dict[str, str | None]:
    """The values of --prompt and --seed, with the words that follow no option: one text, which is the prompt, and the
    numbers behind `--seed N`. Raises `UsageError` for any other word."""
    numbers = [word for word in words or () if seed is not None and SEEDS.fullmatch(word)]
    texts = [word for word in words or () if word not in numbers]
    if len(texts) > 1 or (texts and prompt is not None):
        prompts = [prompt, *texts] if prompt is not None else texts
        weights = [text for text in texts if _may_be_weights(text)]
        joined = " ".join(word for text in prompts if text not in weights for word in text.split())
        shown = f"{joined[:60]}…" if len(joined) > 60 else joined
        hint = " ".join([f'--prompt "{shown}"', *(f"--model {text}" for text in weights[:1])])
        raise UsageError(f"expected one prompt, got {len(prompts)}", hint)
    prompt = texts[0] if texts else prompt
    return {"prompt": read_prompt() if prompt == STDIN else prompt, "seed": seed and " ".join([seed, *numbers])}


def _may_be_weights(text: str) -> bool:
    """Whether a text is a folder or a file of weights, or looks like the path of one."""
    return user_path(text).is_dir() or WEIGHTS_PATH.fullmatch(text) is not None


def read_prompt(command: str = "generate") -> str:
    """The prompt on stdin. Raises `UsageError` where there is none."""
    text = sys.stdin.read(MAX_TEXT + 1).strip() if sys.stdin else ""
    if not text or len(text) > MAX_TEXT:
        problem = f"more than {MAX_TEXT:,} characters" if text else "no prompt"
        raise UsageError(f"stdin brings {problem}", f'echo "a red ball" | ltx2 {command} -')
    return text


def layers(options: ConfigOptions) -> Layers:
    """The values that are asked for in other ways: in a file, by --set, as --aspect, --resolution and --duration."""
    wishes = {wish: str(text) for wish in SIZE_SHORTHANDS if (text := vars(options).get(wish)) is not None}
    return Layers(config_page(options.config), options.config, options.settings or (), wishes)


def run_settings(options: Options) -> RunSettings:
    """The settings of a run among the options of a command."""
    given = vars(options)
    return RunSettings(**{each.name: given[each.name] for each in fields(RunSettings) if each.name in given})


def enhance_settings(options: EnhanceOptions) -> EnhanceSettings:
    """How the text encoder writes a prompt. Raises `UsageError` for unreadable instructions."""
    instructions = read_instructions(options.enhance_with and user_path(str(options.enhance_with)))
    return EnhanceSettings(instructions=instructions, temperature=options.enhance_temperature or 0.0)


def batch_settings(options: BatchOptions, given: Mapping[str, object], confined: bool = False) -> BatchSettings:
    """The settings of a batch: values that are given for all jobs, and options."""
    return BatchSettings(
        **vars(run_settings(options)),
        given=given,
        layers=layers(options),
        names=options.output,
        shard=options.shard,
        batch_size=options.batch_size,
        fail_fast=options.fail_fast,
        confined=confined,
        reads=[options.config] if options.config else [],
    )
