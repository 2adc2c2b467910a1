"""Before a run: check downloads and memory, and agree on one plan between hosts; or print a dry run."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from time import monotonic
from typing import Any, Self

from huggingface_hub import constants

from ltx2_cli.artifacts.files import user_path
from ltx2_cli.artifacts.outputs import RUN
from ltx2_cli.console import columns, print_out, visible
from ltx2_cli.core.enhance import check_writer
from ltx2_cli.core.programs import enable_compilation_cache
from ltx2_cli.core.provenance import versions
from ltx2_cli.errors import UnknownNetworkError, UsageError
from ltx2_cli.estimate.alternatives import Request
from ltx2_cli.estimate.fit import Typed, check_fit
from ltx2_cli.plan.conditions import read_input_audio, read_input_videos
from ltx2_cli.plan.open import find_duration_head, missing_downloads
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.runs.past_times import expected_time
from ltx2_cli.runs.session import DryRunEndError, Facts, Session, short_digest, synchronized
from ltx2_cli.runs.summary import request_rows
from ltx2_cli.units import quantity
from ltx2_cli.weights.hub import Download, check_disk_space, local_path
from ltx2_cli.weights.lora import check_local_loras
from ltx2_cli.weights.published import named_files

# Dotted keys that a command cannot change: fixed by saved latents, by a clip's record, by an unfinished run.
FIXED_BY_LATENTS = frozenset({"height", "width", "num_frames", "num_videos", "model", "recipe"}).__contains__
FIXED_BY_RECORD = frozenset({"num_videos", "model"}).__contains__
FIXED_BY_RUN = "sharding".__ne__


def check_published(request: Request, typed: Typed) -> Plan | None:
    """Check a request whose model is not on this machine, before anything is downloaded: read the LoRAs, images, videos
    and audio that are. Returns the plan by the published configs; None for a model that is here or has none. Raises
    `UsageError` for one that is refused, `DoesNotFitError` for a model of known sizes that does not fit its devices."""
    spec = request.spec
    with suppress(UsageError):
        if local_path(*next(named_files(spec, request.networks))) is not None:
            return None
    check_local_loras([*spec.lora, *(spec.second_stage.lora or ())])
    try:
        return check_fit(request, request.plan(), typed)
    except UnknownNetworkError:  # its files say how large it is
        read_input_videos(spec)
        read_input_audio(spec)
        return None


def fitting_plan(request: Request, typed: Typed) -> Plan:
    """The plan of a request; missing files are downloaded. Raises `DoesNotFitError` if it does not fit, for a published
    model before anything is downloaded."""
    check_published(request, typed)
    return check_fit(request, request.resolved(), typed, Request.resolved)


@dataclass(frozen=True)
class DryRun:
    """The downloads and the work of a command."""

    request: Request
    downloads: Sequence[Download]
    plan: Plan | None  # None: the files that describe the networks are not here

    @classmethod
    def of(cls, request: Request, typed: Typed) -> Self:
        """From local files and the published configs. Raises `UsageError` and `DoesNotFitError` as the run would, as
        far as these tell."""
        plan = check_published(request, typed)
        downloads = missing_downloads(request.spec, request.networks, request.source is not None)
        check_disk_space(downloads)
        if not downloads:
            return cls(request, downloads, fitting_plan(request, typed))
        if plan is None:
            with suppress(UnknownNetworkError):
                plan = check_fit(request, request.plan(), typed)
        return cls(request, downloads, plan)

    def print(self, session: Session, drawn: bool) -> None:
        """Print it on the first host; the seed is marked as random if it was `drawn`."""
        if not session.hosts.first:
            return
        written = [str(path) for path, _ in session.files if path.suffix != RUN]
        if session.as_json:
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
        """The page: downloads, plan and output files."""
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


def plan_facts(plan: Plan) -> Facts:
    """Facts of a plan, before weights are loaded: versions, the weight files' headers, the noise."""
    headers: dict[str, object] = {
        name: [(tensor, entry.shape, entry.dtype) for tensor, entry in sorted(files.items())]
        for name, files in plan.checkpoint.files.items()
    }
    headers["lora"] = {name: sorted(tensors) for name, tensors in plan.lora_deltas.items()}
    contents = {name: repr(header).encode() for name, header in headers.items()}
    contents["noise"] = user_path(plan.spec.initial_noise).read_bytes() if plan.spec.initial_noise else b""
    contents["input video"] = "".join(video.sha256 for video in plan.input_videos).encode()
    contents["input audio"] = plan.input_audio.sha256.encode() if plan.input_audio else b""
    facts = {f"content of {name}": short_digest(content) for name, content in contents.items()}
    facts |= {"mesh": plan.sharding.text, "weights": plan.spec.weights.value, "compute": plan.spec.compute.value}
    return {**{f"version of {package}": version for package, version in versions().items()}, **facts}


@contextmanager
def agreed_plan(session: Session, request: Request, drawn: bool = False) -> Iterator[Plan]:
    """The plan of a request that fits the devices, the same on every host; the body may refuse it. A dry run prints it
    afterwards, with the seed marked as random if it was `drawn`, and ends here if networks must be downloaded first."""
    with synchronized(session.hosts) as facts:
        if session.dry_run:
            preview = DryRun.of(request, session.typed)
            if preview.plan is not None:
                yield preview.plan
            preview.print(session, drawn)
            if preview.plan is None:
                raise DryRunEndError
            return
        enable_compilation_cache(request.spec.compile_cache)
        began = monotonic()
        plan = fitting_plan(request, session.typed)
        if (size := session.download_bytes) and (seconds := monotonic() - began):
            session.report.note(f"downloaded {quantity(size)} in {seconds:.0f} s, {quantity(size / seconds)}/s")
            session.extra_seconds += seconds
        session.download_bytes = 0
        yield plan
        facts |= plan_facts(plan) if session.hosts.count > 1 else {}


def check_downloads(session: Session, request: Request, auto_duration: bool = False, enhances: bool = False) -> None:
    """Report the downloads. Raises `CommandError` if they do not fit the devices or the disk, lack the duration head
    that `auto_duration` takes, or have a text encoder that does not write the prompt where it `enhances`."""
    with synchronized(session.hosts):
        if plan := check_published(request, session.typed):
            if auto_duration:
                find_duration_head(plan.spec.checkpoint, plan.arch, offline=True)
            if enhances:
                check_writer(plan)
        downloads = missing_downloads(request.spec, request.networks)
        check_disk_space(downloads)
        session.download_bytes = sum(file.size for file in downloads)
        for repository, parts in groupby(downloads, lambda file: file.repository):
            size = quantity(sum(part.size for part in parts))
            session.report.note(f"downloading {size} of {repository} into {constants.HF_HUB_CACHE}")
