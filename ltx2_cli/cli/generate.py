"""How options become a request, and a request what is run."""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ltx2_cli.artifacts.files import Output, read_limited, user_path
from ltx2_cli.artifacts.outputs import (
    Product,
    check_outputs,
    check_place,
    outputs,
    read_files,
    run_file,
    with_free_names,
)
from ltx2_cli.cli.options import (
    ConfigOptions,
    MakingOptions,
    Options,
    SessionOptions,
    WishOptions,
)
from ltx2_cli.cli.session import Session, synchronized
from ltx2_cli.core.report import Report
from ltx2_cli.errors import UsageError
from ltx2_cli.media.probe import is_video, is_wav
from ltx2_cli.request.environment import foreign_variables, read_environment, variable_name
from ltx2_cli.request.layers import MAX_TEXT, PAGE, ConfigLayer, read_file, read_text
from ltx2_cli.request.profiles import FLAG, Asked, checked_spec, read_asked
from ltx2_cli.request.size import frames_of, size_of
from ltx2_cli.request.spec import NO_CACHE, RunSpec
from ltx2_cli.request.spelling import NAMES, of_condition
from ltx2_cli.request.validation import random_seed

FILE_AT_FRAME = re.compile(r"(?P<path>.+?)(@(?P<frame>-?\d{1,9}))?(:(?P<strength>-?\d*\.?\d+))?", re.DOTALL)
CONDITIONS = {  # by their kind
    "image": FILE_AT_FRAME,
    "video": FILE_AT_FRAME,
    "reference": re.compile(r"(?P<path>.+?)(:(?P<strength>-?\d*\.?\d+))?", re.DOTALL),
    "mask": re.compile(r"(?P<path>.+)", re.DOTALL),
}
SEEDS = re.compile(r"\d+(\.\.\d+)?,?")
WEIGHTS = re.compile(r"(?!\S*\.[A-Za-z]\w+$)(~|\.{0,2})/\S+|\S+\.safetensors")
STDIN = "-"  # in place of a prompt
ANYTHING = "a"  # the prompt of a warm-up; every text encoder knows it


def check_making(options: MakingOptions) -> None:
    """Raise `UsageError` for options that contradict each other."""
    if options.warmup and options.no_compile:
        raise UsageError("--warmup compiles what --no-compile forbids", "leave one of them out")
    if options.warmup and options.preview:
        raise UsageError("--warmup makes no clip that --preview could show", "leave one of them out")


def make(options: MakingOptions, session: Session, spec: RunSpec, product: Product, config: Path | None = None) -> None:
    """Carry out a request that is the same on all hosts, or say what would be done; `config` is a file it was read
    from."""
    with synchronized(session.hosts) as facts:
        if options.preview and not spec.running.video:
            raise UsageError("--preview shows the picture, and none is made", "leave out --preview, or --no-video")
        facts |= {"preview": str(options.preview)}  # all hosts make it together
    random = spec.seed is None
    if random:  # the first host draws a seed for all
        spec = replace(spec, seed=(int(session.hosts.allgather_text(str(random_seed(spec)))[0]),))
    with synchronized(session.hosts):
        if session.hosts.first:
            spec = with_free_names(spec, product, options.force)
        traces = [Output(options.profile, "--profile")] if options.profile else []
        for folder, flag in traces:
            check_place(folder, flag, "FOLDER")
        if spec.compile_cache not in (None, NO_CACHE):
            check_place(user_path(spec.compile_cache), "--compile-cache", "FOLDER")
        clips = [] if options.warmup else [*outputs(spec, product), run_file(spec)]
        others = {"--perf-dump": options.perf_dump, "--preview": options.preview}
        files = [*clips, *(Output(path, flag) for flag, path in others.items() if path)] if session.hosts.first else []
        check_outputs(files, read_files(spec, config), options.force, folders=traces)
        session.reserve(files)
    session.start()
    from ltx2_cli.cli.execute import run

    run(options, session, spec, product, random, files)


def overrides(options: Options, **others: object) -> dict[str, object]:
    """The options that were given, by their keys in the `RunSpec`. `others` take their place."""
    values = {**vars(options), **others}
    given = {NAMES[name]: value for name, value in values.items() if name in NAMES and value not in (None, [], ())}
    if isinstance(blocks := given.get("stg_blocks"), str):
        try:
            given["stg_blocks"] = [int(block) for block in blocks.split(",")]
        except ValueError:
            hint = "for example: --stg-blocks 0,1; no STG: --stg-scale 0"
            raise UsageError(f"stg_blocks {blocks!r} is not a list of blocks", hint) from None
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
        raise UsageError(f"one prompt makes a clip, and {len(prompts)} texts are given", hint)
    prompt = texts[0] if texts else prompt
    return {"prompt": read_prompt() if prompt == STDIN else prompt, "seed": seed and " ".join([seed, *numbers])}


def _may_be_weights(text: str) -> bool:
    """Whether a text is a folder or a file of weights, or looks like the path of one."""
    return user_path(text).is_dir() or WEIGHTS.fullmatch(text) is not None


def read_prompt() -> str:
    """The prompt on stdin. Raises `UsageError` where there is none."""
    text = sys.stdin.read(MAX_TEXT + 1).strip() if sys.stdin else ""
    if not text or len(text) > MAX_TEXT:
        problem = f"more than {MAX_TEXT:,} characters" if text else "no prompt"
        raise UsageError(f"stdin brings {problem}", 'echo "a red ball" | ltx2 generate -')
    return text


def asked_for(values: Mapping[str, object], options: ConfigOptions) -> Asked:
    """What these values ask for, over the environment and those of --config and under those of --set."""
    page = config_page(options.config)
    asked = read_asked(values, page, options.settings or (), read_environment(os.environ))
    if page and isinstance(options, SessionOptions):
        from ltx2_cli.runs.trust import check_trust

        check_trust(asked, page, options)
    return asked


def configured_spec(values: Mapping[str, object], options: ConfigOptions) -> RunSpec:
    """The request of `asked_for`, checked."""
    return checked_spec(asked_for(values, options))


def sized_spec(values: Mapping[str, object], options: WishOptions, report: Report) -> RunSpec:
    """`configured_spec` of `sized` values; the report is told which variables of the environment it reads."""
    note_environment(report, values, options.settings)
    return configured_spec(sized(values, options, report), options)


def note_environment(report: Report, values: Mapping[str, object], settings: Sequence[str] | None) -> None:
    """Say which variables of the environment a request reads where options ask for these values and --set for others,
    and which it does not though they are called like it."""
    typed = read_asked(values, None, settings or ()).layers[FLAG]
    if variables := [variable_name(key) for key in read_environment(os.environ) if key not in typed]:
        report.preface(f"from the environment: {', '.join(variables)}")
    for sentence in foreign_variables(os.environ):
        report.preface(sentence)


def sized(values: Mapping[str, object], options: WishOptions, report: Report) -> Mapping[str, object]:
    """`values` with the size and length that --aspect, --resolution and --duration ask for; the report is told what
    they became. Raises `UsageError` beside an option that says it in pixels or frames."""
    asked = [text for text in (options.resolution, options.aspect, options.duration) if text is not None]
    if not asked:
        return values
    from ltx2_cli.plan.sizes import legal_lengths

    spec, wished = configured_spec(values, options), dict[str, int]()
    legal = legal_lengths(spec)
    if options.aspect is not None or options.resolution is not None:
        wished |= size_of(spec.width, spec.height, options.aspect, options.resolution, legal)
    if options.duration is not None:
        wished["num_frames"] = frames_of(options.duration, spec.fps, legal)
    for key in wished.keys() & values.keys():
        wish = "--duration" if key == "num_frames" else "--aspect or --resolution"
        raise UsageError(f"--{key.replace('_', '-')} is not taken beside {wish}", f"leave out {wish}")
    spec = configured_spec({**values, **wished}, options)
    length = f"{spec.num_frames} frames, {spec.num_frames / spec.fps:.2f} s"
    report.preface(f"asked: {', '.join(asked)}; got: {spec.width}x{spec.height}, {length}")
    return {**values, **wished}


def config_page(path: Path | ConfigLayer | None) -> ConfigLayer | None:
    """The request in the file that --config names: a page of YAML, or the record of a clip, of latents or in the output
    of `ltx2 info --json` of one file. One that was read before is returned. Raises `UsageError` for anything else."""
    if path is None or isinstance(path, ConfigLayer):
        return path
    if str(path) == STDIN:
        raise UsageError("--config reads a file, not stdin", "write it into a file, or name keys: --set KEY=VALUE")
    if not path.is_file():
        return read_file(path)
    from ltx2_cli.runs.inspect import inspect, looks_like_safetensors

    try:
        has_record = is_video(path) or is_wav(path) or looks_like_safetensors(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check the path") from error
    if has_record:
        if record := inspect(path).get("record"):
            return ConfigLayer(f"the record in {path}: ", record)
        raise UsageError(f"{path} does not say what made it", PAGE)
    try:
        match json.loads(read_limited(path, MAX_TEXT, PAGE)):
            case [{"record": dict(record)}]:
                return read_text(json.dumps(record), f"the record in {path}")
    except (ValueError, RecursionError):
        pass  # it is no JSON
    return read_file(path)
