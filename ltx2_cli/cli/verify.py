"""Comparison of a clip that was made again with the first one: from where on they differ, and by how much."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ltx2_cli.cli.recorded_clip import RecordedClip
from ltx2_cli.console import columns, print_out
from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.request.spec import RunSpec, Streams

if TYPE_CHECKING:
    from ltx2_cli.diffusion.fingerprints import Fingerprint

SAME = "identical"
LEAST = 1e-7  # the smallest relative error that a sketch shows
Row = tuple[str, str]


def check_comparable(clip: RecordedClip, spec: RunSpec) -> list[str]:
    """Sentences on what of a clip cannot be compared. Raises `UsageError` where nothing can, or where `spec` asks for
    several clips."""
    if len(spec.seeds) > 1:
        raise UsageError(f"--verify compares one clip, {len(spec.seeds)} are asked for", "--seed N")
    no_hashes = f"the record in {clip.path} has no hashes of latents, an older version wrote it"
    if not clip.latents and not clip.video:
        raise UsageError(
            f"{no_hashes}; and {clip.path.with_suffix('.mp4')} is not there", "without --verify it is made again"
        )
    if not clip.latents:
        return [f"{no_hashes}: only picture and sound are compared"]
    if clip.video and not clip.is_draft:
        return []
    return [f"only latents are compared: {'it is a draft' if clip.is_draft else 'there is no mp4'}"]


def check_identical(first: RecordedClip, second: RecordedClip, changes: list[str]) -> str:
    """The line to print where both clips are the same. Raises `RunError` after printing where they differ; `changes`
    are the reasons."""
    rows = [*_latents(first, second), *_streams(first, second)]
    different = next((name for name, comparison in rows if comparison != SAME), None)
    if different is None:
        return SAME
    print_out("\n".join(columns(rows)))
    raise RunError(
        f"what was made again is not {first.path}: {different} is the first that differs",
        "; ".join(changes) or "request, weights, versions and devices are the same: something here computes by chance",
    )


def _latents(first: RecordedClip, second: RecordedClip) -> Iterator[Row]:
    for stage, latents in first.latents.items():
        if stage not in second.latents:
            yield stage, "was not made"
            continue
        comparisons = Streams(*map(_comparison, latents, second.latents[stage]))
        same = comparisons == Streams(SAME, SAME)
        yield stage, SAME if same else ", ".join(f"{name} {text}" for name, text in comparisons._asdict().items())


def _comparison(first: "Fingerprint", second: "Fingerprint") -> str:
    """How far apart two arrays are."""
    if first.sha256 == second.sha256:
        return SAME
    if first.size != second.size:
        return "of another size"
    if not (first.has_sketch and second.has_sketch):
        return "differs"
    error = first.error(second)
    return f"differs by about {error:.2g}" if error >= LEAST else f"differs by less than {LEAST:g}"


def _streams(first: RecordedClip, second: RecordedClip) -> Iterator[Row]:
    from ltx2_cli.media.comparison import STREAMS, video_differences

    if first.video and second.video:
        differences = video_differences(first.video, second.video)
        yield from ((name, differences.get(name, SAME)) for name in STREAMS.values())
