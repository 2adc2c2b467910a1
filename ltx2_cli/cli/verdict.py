"""Whether a clip that was made again is the one that it was, and if not, from where on and by how much."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ltx2_cli.cli.recorded import Recorded
from ltx2_cli.console import columns, print_out
from ltx2_cli.spec import AV, RunError, RunSpec, SpecError

if TYPE_CHECKING:
    from ltx2_cli.diffusion.fingerprints import Fingerprint

SAME = "identical"
LEAST = 1e-7  # the smallest relative error that a sketch shows
Row = tuple[str, str]


def check_comparable(then: Recorded, spec: RunSpec) -> list[str]:
    """What of a clip cannot be compared, a sentence each. Raises `SpecError` where nothing can, or where `spec` asks
    for several."""
    if len(spec.seeds) > 1:
        raise SpecError(f"--verify compares one clip, {len(spec.seeds)} are asked for", "--seed N")
    lacks = f"the record in {then.path} has no hashes of latents, an older version wrote it"
    if not then.latents and not then.video:
        raise SpecError(
            f"{lacks}; and {then.path.with_suffix('.mp4')} is not there", "without --verify it is made again"
        )
    if not then.latents:
        return [f"{lacks}: only picture and sound are compared"]
    if then.video and not then.is_draft:
        return []
    return [f"only latents are compared: {'it is a draft' if then.is_draft else 'there is no mp4'}"]


def verdict(then: Recorded, now: Recorded, others: list[str]) -> str:
    """What to print of a clip made again. Raises `RunError` that says the same where it is another; `others` is what
    else is not as it was."""
    rows = [*_latents(then, now), *_streams(then, now)]
    first = next((name for name, found in rows if found != SAME), None)
    if first is None:
        return SAME
    print_out("\n".join(columns(rows)))
    raise RunError(
        f"what was made again is not {then.path}: {first} is the first that differs",
        "; ".join(others) or "request, weights, versions and devices are the same: something here computes by chance",
    )


def _latents(then: Recorded, now: Recorded) -> Iterator[Row]:
    for stage, was in then.latents.items():
        if stage not in now.latents:
            yield stage, "was not made"
        elif _hashes(was) == _hashes(now.latents[stage]):
            yield stage, SAME
        else:
            pairs = zip(AV._fields, was, now.latents[stage], strict=True)
            yield stage, ", ".join(f"{name} {_far(one, other)}" for name, one, other in pairs)


def _hashes(latents: "AV[Fingerprint]") -> list[str]:
    return [each.sha256 for each in latents]


def _far(then: "Fingerprint", now: "Fingerprint") -> str:
    """How far apart two arrays are."""
    if then.sha256 == now.sha256:
        return SAME
    if then.size != now.size:
        return "of another size"
    if not (then.has_sketch and now.has_sketch):
        return "differs"
    error = then.error(now)
    return f"differs by about {error:.2g}" if error >= LEAST else f"differs by less than {LEAST:g}"


def _streams(then: Recorded, now: Recorded) -> Iterator[Row]:
    from ltx2_cli.video_difference import STREAMS, video_differences

    if then.video and now.video:
        found = video_differences(then.video, now.video)
        yield from ((name, found.get(name, SAME)) for name in STREAMS.values())
