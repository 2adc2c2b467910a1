"""`ltx2 upsample`: upsample saved latents and refine them."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ltx2_cli.artifacts.files import user_path
from ltx2_cli.artifacts.outputs import Product, check_outputs, outputs, read_files, run_file
from ltx2_cli.diffusion.latents import FIRST, LatentsFile, open_latents
from ltx2_cli.errors import UsageError
from ltx2_cli.request.layers import ConfigLayer, flatten, read_text
from ltx2_cli.request.profiles import AUTO, FLAG, merge_layers, recipe_defaults
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.spelling import option_name, short_name, typed
from ltx2_cli.request.validation import validate
from ltx2_cli.runs.build_request import Layers, note_environment
from ltx2_cli.runs.latents import latents_request
from ltx2_cli.runs.session import Session, file_facts, request_facts, synchronized
from ltx2_cli.runs.settings import RunSettings
from ltx2_cli.runs.trust import Trust

# Keys that a second stage does not read.
FIRST_STAGE = ("num_inference_steps", "sigmas", "sampler", "eta", "image_strength", "first_block_cache")
KEYFRAME_WINDOWS = "second_stage.keyframe_windows"
SEED = re.compile(r"-s\d+$")  # the part of a file name that differs between drafts


def upsample_clips(
    session: Session,
    paths: Sequence[Path],
    given: Mapping[str, object],
    layers: Layers,
    settings: RunSettings,
    *,
    product: Product,
    refine: bool,
) -> None:
    """Make the clips of saved latents, or only their latents, and print the paths. `given` are values of the request by
    their keys."""
    with synchronized(session.hosts) as facts:
        files = [open_latents(user_path(path)) for path in paths]
        if product is Product.latents and "save_latents" not in given:
            raise UsageError(
                "--latents-only writes latents, and no file is named for them", typed("save_latents", "FILE")
            )
        if any("record" not in file.metadata for file in files):
            note_environment(session.report, given, layers.settings)
        for file in files:
            if not all(file.shapes.video):
                raise UsageError(f"{file.path} holds no video to upsample", "`ltx2 decode` writes its audio")
            if not ("prompt" in given or not refine or layers.file or "record" in file.metadata):
                raise UsageError(f"{file.path} does not say what it shows", f'{typed("prompt")}"...", or --no-refine')
        jobs = [(group, _spec(group, given, layers, refine, session)) for group in _groups(files, given, product)]
        specs = [spec for _, spec in jobs]
        from ltx2_cli.diffusion.sampler import find_sampler  # imports jax, which refusals above do without

        samplers = filter(None, {spec.second_stage.sampler for spec in specs})
        draws = any(find_sampler(sampler).draws for sampler in samplers)
        for key in merge_layers(given, None, layers.settings).layers[FLAG]:
            if key in FIRST_STAGE and not (key == "eta" and draws):
                session.report.defer(f"{short_name(key)} changes nothing, saved latents have their first stage")
        for (first, *_), spec in jobs:
            facts |= {f"{first.path.name}: {key}": value for key, value in request_facts(spec).items()}
        facts |= {**file_facts(file.path for file in files), "product": product.value}
        if session.hosts.first:
            written = [file for spec in specs for file in (*outputs(spec, product), run_file(spec))]
            reads = read_files(specs[0], layers.file, *(file.path for file in files))
            check_outputs(written, reads, session.force)
            session.reserve(written)
    session.start()
    from ltx2_cli.runs.execute import go_on

    for group, spec in jobs:
        go_on(session, group, spec, product, settings)
    if not session.dry_run:
        written = [file for spec in specs for file in outputs(spec, product)]
        session.finish(written, {"seeds": [seed for spec in specs for seed in spec.seeds]})


def _groups(files: Sequence[LatentsFile], given: Collection[str], product: Product) -> list[list[LatentsFile]]:
    """The files of each run: all of them if the output has a name, else groups that differ only in the seed. Raises
    `UsageError` for a file that is named twice, and for several runs that save latents under one name."""
    named: dict[Path, list[LatentsFile]] = {}
    for file in files:
        named.setdefault(file.path.with_stem(SEED.sub("", file.path.stem)), []).append(file)
    for file in [file for group in named.values() for file in group]:
        if sum(os.path.samefile(file.path, other.path) for other in files) > 1:
            raise UsageError(f"{file.path} is named twice", "name each file once")
    if "output" in given or product is Product.latents:
        return [list(files)]
    if "save_latents" in given and len(named) > 1:
        several = ", ".join(str(file.path) for file in files)
        raise UsageError(
            f"{option_name('save_latents')} is one name, and {several} have several",
            "-o FILE too, to name all by their seeds; or upsample them one by one",
        )
    return list(named.values())


def _spec(
    files: Sequence[LatentsFile], given: Mapping[str, object], layers: Layers, refine: bool, trust: Trust
) -> RunSpec:
    """The request of one run; without -o its clips are named after their latents."""
    path = files[0].path
    stem = SEED.sub("", path.stem) if len(files) > 1 else path.stem
    replaced: dict[str, object] = {"output": str(path.with_name(f"{stem}-upsampled.mp4")), "num_videos": 1}
    if any(file.metadata.get("stage") != FIRST for file in files):  # a draft's recipe has a second stage
        replaced["recipe"] = AUTO
    spec = merged_request(files, [latents_request(file, given, layers, replaced, trust) for file in files])
    if KEYFRAME_WINDOWS not in merge_layers(given, None, layers.settings).layers[FLAG]:
        spec = _with_windows_of_round(spec, files[0])
    no_stage = replace(spec.second_stage, sigmas=(), lora=(), follow_first=False)
    no_stage = replace(no_stage, keyframe_windows=None, spatial_tiles=None, temporal_tiles=None)
    return spec if refine else replace(spec, second_stage=no_stage)


def _with_windows_of_round(spec: RunSpec, file: LatentsFile) -> RunSpec:
    """The request with the windows of its round between keyframes: twice those of the round before, at most one for
    each segment. Another request stays."""
    usual = None if spec.recipe == AUTO else recipe_defaults(spec, spec.recipe).second_stage.keyframe_windows
    if not usual or not file.keyframes:
        return spec
    record = read_text(file.metadata.get("record", ""), f"the record in {file.path}").values
    before = flatten(ConfigLayer("", {"second_stage": record.get("second_stage") or {}})).get(KEYFRAME_WINDOWS)
    windows = min(2 * before if isinstance(before, int) else usual, file.keyframes)
    return replace(spec, second_stage=replace(spec.second_stage, keyframe_windows=windows))


def merged_request(files: Sequence[LatentsFile], specs: Sequence[RunSpec]) -> RunSpec:
    """One request for all files, with all seeds. Raises `UsageError` if more than the seeds differs."""
    first = vars(specs[0])
    for file, spec in zip(files, specs, strict=True):
        if others := ", ".join(sorted(key for key in first if key != "seed" and vars(spec)[key] != first[key])):
            raise UsageError(f"{file.path} was not made like {files[0].path}: {others}", "go on from them one by one")
        if file.keyframes != files[0].keyframes:
            counts = f"{file.path} has {file.keyframes} generated keyframes, {files[0].path} {files[0].keyframes}"
            raise UsageError(counts, "go on from them one by one")
    if len({spec.seed for spec in specs}) < len(specs):
        raise UsageError("several of these latents have one seed", "upsample them one by one")
    merged = replace(specs[0], seed=tuple(seed for spec in specs for seed in spec.seed or ()))
    validate(merged)
    return merged
