"""The clips of a plan, their records, latents and contact sheets, written to files."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from math import prod
from pathlib import Path

import jax
import numpy as np

from ltx2_cli.artifacts.outputs import Product, latents_paths, output_paths, record_path, sheet_path, single_specs
from ltx2_cli.core.components import Components
from ltx2_cli.core.decode import decode
from ltx2_cli.core.denoise_memory import kept_networks
from ltx2_cli.core.join import finished_clips
from ltx2_cli.core.provenance import SKIPPED_FORWARDS, extend_history, input_files, network_files, provenance
from ltx2_cli.core.report import WRITE, Report
from ltx2_cli.core.run import (
    DECODED,
    SILENT,
    START,
    _running,
    programs,
    run_phases,
)
from ltx2_cli.core.state import (
    OnProgress,
    RunState,
    all_latents,
    clean_videos,
    ignore_progress,
    latents_of,
)
from ltx2_cli.diffusion.geometry import SIZE_KEYS
from ltx2_cli.diffusion.latents import from_tokens, save_latents
from ltx2_cli.media.checks import clip_flaws
from ltx2_cli.media.contact_sheet import write_contact_sheet
from ltx2_cli.media.packets import write_clip
from ltx2_cli.media.write import write_record
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.profiles import to_yaml
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.weights.digests import digests, hash_later, quick_digest


def write(
    plan: Plan,
    components: Components,
    report: Report = SILENT,
    product: Product = Product.clips,
    start: RunState = START,
    on_progress: OnProgress = ignore_progress,
) -> Iterator[tuple[Path, list[str]]]:
    """Run a plan and write its product. The first host yields the path of each video, when it and its record are
    written, and the flaws of the clip; for other products, the paths of latents or of the sheet. `start` is the state
    that an earlier run left; `on_progress` is called with each new state."""
    first, written = jax.process_index() == 0, start.written
    if first:  # files are hashed while their pages are in memory, for the records of later runs
        components.after_load = lambda network: hash_later(network_files(plan, network))
    requests, videos, saved = single_specs(plan.spec), output_paths(plan.spec), latents_paths(plan.spec)
    kept = kept_networks(plan) if product is Product.clips else ()

    def keep_written(progress: RunState) -> None:
        on_progress(replace(progress, written=written))

    running = _running(plan, components, report, programs(plan, product, start))
    batches = run_phases(plan, start, components, report, keep_written, pausing=bool(kept))
    with components.keeping(kept), running, closing(batches):
        for state in batches:
            rows = range(written, clean_videos(plan, state.phase, state.batch))
            metadata = dict(zip(rows, _metadata(plan, report, state, requests, rows), strict=True)) if first else {}
            for row in metadata if saved else ():
                latents = from_tokens(latents_of(state, range(row, row + 1)), plan.latent_shapes)
                save_latents(latents, saved[row], metadata[row], _keyframes(plan, state, row))
                if product is not Product.clips:
                    yield saved[row], []
            if product is Product.drafts:
                yield from _write_sheet(plan, state, components, report)
            make_clips = rows and product is Product.clips
            seeds = plan.seeds[rows.start : rows.stop]
            clips = finished_clips(plan, latents_of(state, rows), seeds, components, report) if make_clips else ()
            for clip, row in zip(clips, rows, strict=False):
                written = row + 1
                if first:
                    with report.activity(WRITE):
                        remark = write_clip(clip, videos[row], metadata[row])
                        write_record(record_path(videos[row]), metadata[row]["record"])
                    if remark:
                        report.note(f"{videos[row]}: {remark}")
                keep_written(state)
                if first:
                    yield videos[row], clip_flaws(clip)


def _keyframes(plan: Plan, state: RunState, row: int) -> np.ndarray | None:
    """The keyframes that were generated beside a clip, in the order of time and in the files' layout."""
    stage, (_, channels, _, *size) = plan.stages[-1], plan.latent_shapes.video
    if state.behind is None or not (count := stage.kept_keyframes):
        return None
    end = stage.geometry.token_counts[1] if stage.begins_behind else stage.behind_tokens
    keyframes = state.behind[row, end - count * prod(size) : end].reshape(1, count, *size, channels)
    order = np.argsort([begin for begin, _ in stage.geometry.keyframes[-count:]])
    return keyframes[:, order].transpose(0, 4, 1, 2, 3)


def _write_sheet(
    plan: Plan, state: RunState, components: Components, report: Report
) -> Iterator[tuple[Path, list[str]]]:
    media = decode(plan, all_latents(state), plan.seeds, components, report, DECODED[Product.drafts])
    clips = ((f"seed {seed}: {plan.prompts[0]}", clip) for seed, clip in zip(plan.seeds, media, strict=True))
    if jax.process_index() == 0:
        write_contact_sheet(clips, path := sheet_path(plan.spec))
        yield path, []
    for _ in clips:  # the other hosts decode with the first
        pass


def _metadata(
    plan: Plan, report: Report, state: RunState, requests: Sequence[RunSpec], rows: range
) -> Iterator[Mapping[str, str]]:
    """The metadata of each video: its record, and the values that decoding and upsampling need."""
    files: Mapping[str, str] = {}
    try:
        files = digests(input_files(plan), quick_digest)  # the digests known by now: no clip waits for others
    except OSError as error:  # no reason to lose the clip
        report.note(f"the record will not say which weights these are: {error}")
    last, history = plan.stages[-1], state.history[rows.start : rows.stop]
    if state.phase < len(plan.phases):  # other batches of the stage are not done
        history = extend_history(history, last, latents_of(state, rows))
    facts = {"model_version": plan.arch.model_version, "fps": str(last.geometry.fps), "stage": last.name}
    size = plan.arch.compression.clip_size(last.geometry.frames, last.geometry.height, last.geometry.width)
    size = size if plan.running.video else (plan.num_frames, *size[1:])
    facts |= dict(zip(SIZE_KEYS, map(str, size), strict=True))
    skipped = [{SKIPPED_FORWARDS: count} for count in state.skipped] or [{}] * len(plan.seeds)
    for row, spec, past in zip(rows, requests[rows.start : rows.stop], history, strict=True):
        yield {**facts, "record": to_yaml(spec, provenance(plan, files, {**past, **skipped[row]}))}
