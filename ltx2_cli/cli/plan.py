"""What a clip would need: `ltx2 plan`, without weights, on devices that need not be here; `--dry-run`; whether a
request fits, and the command to type instead."""

import json
import math
import re
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
from huggingface_hub import constants

from ltx2_cli.artifacts.outputs import RUN
from ltx2_cli.cli.names import ALIASES
from ltx2_cli.cli.registry import COMMANDS, typed_command
from ltx2_cli.cli.session import Session
from ltx2_cli.console import columns, print_out, visible
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import programs
from ltx2_cli.errors import UnknownNetworkError, UsageError
from ltx2_cli.estimate.compiled import Collective, Compiled, sent_bytes, write_hlo
from ltx2_cli.estimate.cycles import REMARKS, Cycles, dumped_schedules
from ltx2_cli.estimate.estimate import FORWARD, Estimate, assumptions, compile_and_estimate, forward_programs, record
from ltx2_cli.estimate.fit import FRACTION, Alternative, Request, check_estimate, check_fit
from ltx2_cli.estimate.offline import MeshSearch, search_meshes, topology
from ltx2_cli.estimate.phases import DECODE, DENOISE, REFINE, UPSAMPLE
from ltx2_cli.nn.layers import IMAGE_AXES
from ltx2_cli.parallel.devices import RESERVE_REMARK, find_devices, fraction_variable
from ltx2_cli.plan.conditions import read_given_sound, read_pictures
from ltx2_cli.plan.inputs import STAGE2_DENOISER
from ltx2_cli.plan.open import missing_downloads
from ltx2_cli.plan.resolve import Plan, plan_offline
from ltx2_cli.request.size import WISHES
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.runs.past_times import expected_time
from ltx2_cli.units import duration, quantity
from ltx2_cli.weights.hub import Download, check_disk_space, local_path
from ltx2_cli.weights.lora import check_local_loras
from ltx2_cli.weights.published import FOLDER_FILES

SETTING = "--set"


@dumped_schedules()
def print_plan(
    spec: RunSpec,
    report: Report,
    *,
    slice_name: str | None,
    search: bool,
    everything: bool,
    dump: Path | None,
    as_json: bool,
) -> None:
    """Print the plan of a request and its estimate, for a slice or the devices here: after a `search` of meshes, by
    the forwards or `everything`. The programs go into the folder `dump`. Raises `DoesNotFitError` afterwards where it
    does not fit."""
    if slice_name is not None:
        jax.config.update("jax_platforms", "cpu")  # the devices of this machine are left alone
    if dump:
        dump.mkdir(parents=True, exist_ok=True)
    devices = topology(slice_name) if slice_name is not None else tuple(find_devices())
    chosen = plan_offline(spec, devices)
    meshes = search_meshes(chosen, devices, report) if search else None
    best = meshes.best if meshes else None
    if best and not everything:
        estimate = best
    else:
        chosen = best.plan if best else chosen
        others = programs(chosen) if everything else ()
        estimate = compile_and_estimate(chosen, [*forward_programs(chosen), *others], report)
    if dump:
        write_hlo(estimate.compiled, dump)
    if as_json:
        print_out(json.dumps({**record(estimate), **(meshes.record() if meshes else {})}, indent=2))
    else:
        print_out("\n".join(map(visible, [*(search_lines(meshes) if meshes else ()), *estimate_lines(estimate)])))
    check_estimate(spec, devices, estimate, slice_name is not None, command_line)
    report.tell()


def check_published(request: Request) -> None:
    """Of a model that is not on this machine, before anything is downloaded: read the LoRAs, pictures and sounds that
    are. Raises `UsageError` for one that is refused, `DoesNotFitError` for a model of known sizes that does not fit its
    devices."""
    spec = request.spec
    with suppress(UsageError):
        if local_path(spec.checkpoint, FOLDER_FILES) is not None:
            return
    check_local_loras([*spec.lora, *(spec.second_stage.lora or ())])
    try:
        check_fit(request, request.plan(), command_line)
    except UnknownNetworkError:  # its files say how large it is
        read_pictures(spec)
        read_given_sound(spec)


def fitting_plan(request: Request) -> Plan:
    """The plan of a request, whose files are downloaded if they are not here. Raises `DoesNotFitError` where it does
    not fit: of a published model before anything is downloaded."""
    check_published(request)
    plan = request.resolved()
    check_fit(request, plan, command_line)
    return plan


@dataclass(frozen=True)
class DryRun:
    """What a command would download, and do."""

    request: Request
    downloads: Sequence[Download]
    plan: Plan | None  # None: what the networks are stands in files that are not here

    @classmethod
    def of(cls, request: Request) -> Self:
        """By the files that are here and the published configs. Raises `UsageError` and `DoesNotFitError` where the run
        would, as far as these tell."""
        check_published(request)
        downloads = missing_downloads(request.spec, request.source is not None)
        check_disk_space(downloads)
        if not downloads:
            return cls(request, downloads, fitting_plan(request))
        try:
            plan = request.plan()
        except UnknownNetworkError:
            return cls(request, downloads, None)
        check_fit(request, plan, command_line)
        return cls(request, downloads, plan)

    def print(self, session: Session, drawn: bool) -> None:
        """Print it on the first host; the seed as a random one if it was `drawn`."""
        if not session.hosts.first:
            return
        written = [str(path) for path, _ in session.files if path.suffix != RUN]
        if session.options.as_json:
            print_out(json.dumps(self.record(written, drawn), ensure_ascii=False))
        else:
            print_out("\n".join(map(visible, self.lines(written, drawn))))

    @property
    def parts(self) -> Counter[str]:
        """The bytes to download, by folder or file of a repository."""
        sizes = Counter[str]()
        for file in self.downloads:
            sizes[f"{file.repository}/{file.name.split('/')[0]}"] += file.size
        return sizes

    def lines(self, written: Sequence[str], drawn: bool) -> Iterator[str]:
        """The page: what is downloaded, used and written."""
        if self.downloads:
            yield f"to download into {constants.HF_HUB_CACHE}:"
            for name, size in [*self.parts.most_common(), ("in all", self.parts.total())]:
                yield f"{quantity(size):>9}  {name}"
            yield ""
        table = [] if self.downloads else [("download", "nothing")]
        if self.plan is None:
            table += [("model", f"{self.request.spec.model}: what it takes is known once its configs are here")]
        else:
            table += [*request_rows(self.plan, self.request.memory(self.plan))]
            seeds = ", ".join(map(str, self.plan.spec.seeds))
            table += [("seed", f"random, for example {seeds}" if drawn else seeds)]
            table += [("time", expected_time(self.plan, self.request.product))] if not self.request.skipped else []
        table += [("write", path) for path in written]
        yield from columns([*table, *(("note", warning) for warning in (self.plan.warnings if self.plan else ()))])

    def record(self, written: Sequence[str], drawn: bool) -> dict[str, Any]:
        """The page for a program: bytes, and the rows of the plan by their names."""
        record: dict[str, Any] = {"download": {"bytes": self.parts.total(), "parts": dict(self.parts)}}
        if plan := self.plan:
            memory, rows = self.request.memory(plan), dict[str, list[str]]()
            for name, text in request_rows(plan, memory):
                rows.setdefault(name, []).append(text)
            time = expected_time(plan, self.request.product) if not self.request.skipped else None
            record |= {"plan": rows, "memory": {phase: needed.peak for phase, needed in memory.items()}, "time": time}
            record |= {"seeds": plan.spec.seeds, "random_seed": drawn, "warnings": plan.warnings}
        return {**record, "write": written}


def command_line(alternative: Alternative) -> str:
    """The command line that was typed, with what an alternative asks otherwise, ready to be copied."""
    verbs, command = typed_command()
    assert command  # which is running
    words = sys.argv[1 + len(verbs) :]
    variable = [f"{fraction_variable()}={FRACTION}"] if alternative.most_memory else []
    if verbs == ["batch"]:  # whose lines have values of their own
        values = ", ".join(f'"{key}": {_in_json(value)}' for key, value in alternative.options.items())
        return " and ".join([*variable, *([f"{values} in the line"] if values else [])])
    if alternative.anew and verbs != ["sweep"]:
        words = ["--prompt", alternative.values["prompt"]]
        if command.requires_words:  # a clip or latents, of which it knows nothing
            verbs, command = ["generate"], COMMANDS["generate"]
    options = command.parameters.keys()
    typed = "".join(f"\0{word}" for word in words)  # no word has a NUL in it
    for key, value in alternative.options.items():
        flag = f"--{key.replace('_', '-')}"
        wishes = [f"--{wish}" for wish, keys in WISHES.items() if key in keys]
        flags = "|".join(map(re.escape, [flag, *wishes, *ALIASES.get(flag, ())]))
        given_before = rf"\0({SETTING}[=\0]{re.escape(key)}=|({flags})[=\0])[^\0]*"
        added = f"\0{flag}\0{value}" if key in options else f"\0{SETTING}\0{key}={value}"
        typed = re.sub(given_before, "", typed) + added
    return " ".join([*variable, shlex.join(["ltx2", *verbs, *typed.split("\0")[1:]])])


def _in_json(value: str) -> str:
    """A value as it is typed, in JSON: a text has quotes."""
    try:
        json.loads(value)
    except ValueError:
        return json.dumps(value)
    return value


def request_rows(plan: Plan, phases: Collection[str]) -> Iterator[tuple[str, str]]:
    """What a run would do in these phases, a name and a value a row."""
    spec, mesh, decoding = plan.spec, plan.sharding.mesh, plan.decoding
    files = "" if plan.checkpoint.files else ", by the configs that come with ltx2"
    yield "model", (spec.model if spec.model == spec.checkpoint else f"{spec.model}, {spec.checkpoint}") + files
    if spec.text_encoder is not None:
        yield "text", spec.text_encoder
    yield from (("lora", lora) for lora in spec.lora)
    yield "recipe", spec.recipe
    clip = f"{spec.width}x{spec.height}, {spec.num_frames} frames at {spec.fps:g} a second"
    videos = f", {spec.num_videos} at once" if spec.num_videos > 1 else ""
    seconds = f"{spec.num_frames / spec.fps:.1f} s{videos}"
    yield ("video", f"{clip}: {seconds}") if spec.running.video else ("sound", f"{seconds}, alone")
    for condition in spec.conditions:
        shown, strength = f"{condition.kind} {condition.path}", f"strength {condition.strength:g}"
        match condition.kind:
            case "reference":
                count = condition.num_frames or 1
                frames = f"{count} frames" if count > 1 else "a picture"
                size = f"1/{condition.downscale} of the size" if condition.downscale != 1 else "the clip's size"
                yield "follows", f"{shown}, {frames} at {size}, {strength}"
            case "mask":
                yield "follows", f"where {shown} is white"
            case "clip":
                begin, end = condition.anew
                yield "anew", f"frames {begin} to {end} of {shown}, {condition.streams}"
            case _:
                yield "shows", f"{shown} at frame {condition.frame}, {strength}"
    if spec.reference_strength != 1:
        yield "follows", f"with a share of {spec.reference_strength:g} of the attention"
    if spec.audio:
        yield "sound", spec.audio.path
    for stage in plan.stages:
        if stage.source is not None and UPSAMPLE in phases:
            yield "upsample", spec.second_stage.upsampler or f"{spec.checkpoint}, its own upsampler"
        if (REFINE if stage.source else DENOISE) not in phases:
            continue
        if stage.network == STAGE2_DENOISER:
            yield from (("lora", lora) for lora in spec.second_stage.lora or ())
        video, audio, text = stage.geometry.video_tokens, stage.geometry.audio_frames, spec.max_sequence_length
        yield "tokens", f"{video} of video, {audio} of sound, {text} of text"
        passes = ", ".join(guidance_pass.name.lower() for guidance_pass in stage.passes)
        other = f"; devices {stage.sharding.text}" if stage.sharding != plan.sharding else ""
        yield "denoise", f"{stage.steps} steps, passes: {passes}{other}"
    height, width = (decoding.mesh.shape[axis] for axis in IMAGE_AXES)
    parts = [f"{decoding.videos} videos at a time"] if decoding.videos > 1 else []
    parts += [f"images in {height}x{width} parts"] if height * width > 1 else []
    parts += ["{}x{}x{} tiles of frames, height and width".format(*decoding.tiles.counts)] if decoding.tiles else []
    parts += [] if decoding.at_once or not decoding.sound_bytes else ["the sound after the frames"]
    if spec.running.video and DECODE in phases:
        yield "decode", ", ".join([*parts, f"about {quantity(decoding.bytes)} on a device"])
    kind = mesh.devices.flat[0].device_kind
    yield "devices", f"{mesh.size} {kind}, profile {spec.sharding.profile}: {plan.sharding.text}"
    if plan.layout:
        yield "passes", plan.layout


def estimate_lines(estimate: Estimate) -> Iterator[str]:
    """The page of `ltx2 plan`, a heading over each part."""
    warnings = [("note", warning) for warning in estimate.warnings]
    yield from columns([*request_rows(estimate.plan, estimate.memory), *warnings])
    yield from ("", *_memory(estimate))
    names = [f", stage {number}" for number in range(1, len(estimate.stages) + 1)] if estimate.stages[1:] else [""]
    for number, name in enumerate(names):
        yield from ("", f"one forward of a device{name}", *_forward(estimate, number))
    if estimate.expected_seconds:
        yield from ("", "expected time, not measured on hardware")
        steps = zip(names, estimate.stages, strict=True)
        rows = [(f"  step{name}", stage.expected_seconds.text, "") for name, stage in steps if stage.expected_seconds]
        each = ", ".join(f"{phase} {time.text}" for phase, time in estimate.expected_phase_seconds.items())
        yield from columns([*rows, ("  clip", estimate.expected_seconds.text, each)], right=(1,))
        yield from ("", "least time: no run is faster")
        rows = []
        for name, stage in zip(names, estimate.stages, strict=True):
            parts = (stage.roofline_seconds or {}).items()
            rows.append((f"  step{name}", duration(stage.seconds_per_step or 0), _durations(parts)))
        phases = estimate.phase_seconds
        rows.append(("  clip", duration(sum(phases.values())), _durations(phases.items())))
        yield from columns(rows, right=(1,))
        yield from (f"  if {assumption}" for assumption in assumptions(estimate.plan))
    for name, stage in zip(names, estimate.stages, strict=True):
        if stage.forward and (cycles := stage.forward.cycles) and stage.roofline_seconds:
            yield from ("", *_cycles(f"step{name}", cycles, stage.roofline_seconds["compute"]))
    yield from _others(estimate.compiled)


def _memory(estimate: Estimate) -> Iterator[str]:
    limit = estimate.device_bytes
    reserve = f" without {RESERVE_REMARK}" if estimate.plan.sharding.mesh.devices.flat[0].platform == "gpu" else ""
    yield "memory of a device" + ("" if math.isinf(limit) else f", of {quantity(int(limit))}{reserve}")
    rows = []
    for phase, memory in estimate.memory.items():
        about = "about " if memory == estimate.uncompiled[phase] else ""
        parts = f"weights {quantity(memory.weights)}, beside them {about}{quantity(memory.activations)}"
        if memory.loading > memory.weights + memory.activations:
            parts += f"; {quantity(memory.loading)} while it is loaded"
        rows.append((f"  {phase}", quantity(memory.peak), parts, "" if memory.peak <= limit else "does not fit"))
    yield from columns(rows, right=(1,))


def _forward(estimate: Estimate, number: int) -> Iterator[str]:
    """One forward of a stage. Collectives of one kind along the same axes are one row, those that send most first."""
    forward = estimate.stages[number].forward
    rows = [("  work", quantity(estimate.stages[number].flops, "FLOP"), "", "", "")]
    if forward is None:
        reasons = [failure.reason for failure in estimate.failures] or ["the weights do not fit"]
        yield from columns([*rows, ("  not compiled", "", "", reasons[0], "")], right=(1,))
        return
    sizes = vars(forward.memory).items()
    rows += [(f"  {name.removesuffix('_bytes')}", quantity(size), "", "", "") for name, size in sizes]
    waited_for = sent_bytes(collective for collective in forward.collectives if not collective.asynchronous)
    waits = f"arithmetic waits for {quantity(waited_for)} of it" if forward.sent_bytes else ""
    rows.append(("  sends", quantity(forward.sent_bytes), _link_time(forward.collectives), waits, ""))
    groups: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for collective in forward.collectives:
        groups.setdefault((collective.kind, collective.axes), []).append(collective)
    for (kind, axes), group in sorted(groups.items(), key=lambda item: -sent_bytes(item[1])):
        times = sum(collective.times for collective in group)
        along = f"along {', '.join(axes)}" if axes else ""
        rows.append((f"    {kind}", quantity(sent_bytes(group)), _link_time(group), along, f"{times} times"))
    yield from columns(rows, right=(1, 2))
    yield f"  compiled in {forward.compile_seconds:.0f} s"


def _link_time(collectives: Sequence[Collective]) -> str:
    """What collectives take at the published rates of the links that they cross."""
    seconds = sum(collective.seconds or 0 for collective in collectives)
    return duration(seconds) if seconds else ""


def _cycles(step: str, cycles: Cycles, least: float) -> Iterator[str]:
    """A forward by the compiler, by parts of the network; `least`: the seconds of its arithmetic at the chip's rate."""
    yield f"by {cycles.clock}: nothing was run"
    ratio = f"{cycles.seconds / least:.2f} times its work at the chip's rate"
    rows = [(f"  {step}", duration(cycles.seconds), f"{cycles.total / 1e6:.3g} M cycles, {ratio}")]
    for scope, number in sorted(cycles.by_scope.items(), key=lambda row: -row[1]):
        rows.append((f"    {scope}", duration(number / cycles.hertz), f"{number / 1e6:.3g} M cycles"))
    yield from columns(rows, right=(1,))
    yield f"  dearest but for products: {cycles.dearest}, {cycles.dearest_cycles / 1e6:.3g} M cycles"
    yield f"  without {REMARKS[cycles.clock].format(cycles.kernels / 1e6)}"
    if cycles.searching:
        search = f"finding the largest score takes {cycles.searching / 1e6:.3g} M more"
        yield f"  if |q|·|k| of each head stays below a bound; where it does not, {search}"


def _others(programs: Iterable[Compiled]) -> Iterator[str]:
    """The programs of `--all` but the forwards."""
    rows = []
    for program in programs:
        if program.cycles and not program.name.startswith(FORWARD):
            cycles = program.cycles
            ratio = f", {cycles.total / cycles.products:.1f} times their products" if cycles.products else ""
            rows.append((f"  {program.name}", duration(cycles.seconds), f"{cycles.total / 1e6:.3g} M cycles{ratio}"))
    if rows:
        yield from ("", "the other programs, by the same clock", *columns(rows, right=(1,)))


def search_lines(search: MeshSearch) -> Iterator[str]:
    """Each mesh that was tried, and which was chosen, and why."""
    yield f"meshes, the cheapest first; {search.seconds:.0f} s"
    rows = [("  mesh", "a device needs", "sends", "least step", "expected")]
    for candidate in search.tried:
        stage, sends, least, expected = candidate.stages[0], "does not fit", "", ""
        if candidate.fits:
            sends = quantity(stage.forward.sent_bytes) if stage.forward else "not compiled"
            least = duration(stage.seconds_per_step) if stage.seconds_per_step and stage.forward else ""
            expected = stage.expected_seconds.text if stage.expected_seconds else ""
        needs = quantity(max(candidate.phase_bytes.values()))
        rows.append((f"  {candidate.plan.sharding.text}", needs, sends, least, expected))
    yield from columns(rows, right=(1, 2, 3, 4))
    if search.best is None:
        yield "none of them fits"
    else:
        yield f"chosen: {search.best.plan.sharding.text}; its step is the shortest, of equal ones it sends least"
    yield ""


def _durations(parts: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{part} {duration(seconds)}" for part, seconds in parts)
