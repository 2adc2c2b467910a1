"""What a run would do: what it would download, and once nothing is missing, what it would make of the request."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from ltx2_cli.cli.memory import check_published, fitting_plan
from ltx2_cli.core.record import input_files
from ltx2_cli.decoding import Decoding, bytes_on_device
from ltx2_cli.forecast.requests import Request
from ltx2_cli.nn.halo import IMAGE_AXES
from ltx2_cli.outputs import RUN, check_distinct
from ltx2_cli.plan import Plan, missing
from ltx2_cli.refiner import holding, refiners_own
from ltx2_cli.spec import Hold
from ltx2_cli.stages import REFINER
from ltx2_cli.units import natural
from ltx2_cli.weights.hub import Download, cache_folder, check_room
from ltx2_cli.writing import Output


def preview(request: Request, random: bool, files: Sequence[Output]) -> Iterator[str]:
    """The lines of `--dry-run`; `random`: another seed will be drawn. Raises `SpecError` and `FitError` where the run
    would."""
    check_published(request)
    absent = missing(request.spec)
    yield from _listing(absent)
    check_room(absent)
    if not absent:
        plan = fitting_plan(request)
        check_distinct(files, input_files(plan))
        yield from _doing(plan, random)
        yield from (_line("write", str(path)) for path, _ in files if path.suffix != RUN)
        yield from (_line("warning", warning) for warning in plan.warnings)


def downloading(absent: Sequence[Download]) -> Iterator[str]:
    """A line for each repository of which something is to be downloaded."""
    for repository, files in groupby(absent, lambda file: file.repository):
        size = natural(sum(file.size for file in files))
        yield f"downloading {size} of {repository} into {cache_folder()}"


def _listing(absent: Sequence[Download]) -> Iterator[str]:
    if not absent:
        yield _line("download", "nothing")
        return
    yield f"to download into {cache_folder()}:"
    sizes: dict[str, int] = {}
    for file in absent:
        place = f"{file.repository}/{file.name.split('/')[0]}"
        sizes[place] = sizes.get(place, 0) + file.size
    for place, size in sorted(sizes.items(), key=lambda item: -item[1]):
        yield f"{natural(size):>9}  {place}"
    yield f"{natural(sum(sizes.values())):>9}  in all"


def _doing(plan: Plan, random: bool) -> Iterator[str]:
    spec, devices = plan.spec, plan.sharding.mesh.devices
    yield _line("model", spec.model if spec.model == spec.checkpoint else f"{spec.model}, {spec.checkpoint}")
    if spec.text_encoder is not None:
        yield _line("text", spec.text_encoder)
    for lora in spec.lora:
        yield _line("lora", lora)
    yield _line("recipe", spec.recipe)
    clip = f"{spec.width}x{spec.height}, {spec.num_frames} frames at {spec.fps:g} a second"
    yield _line("video", f"{clip}: {spec.num_frames / spec.fps:.1f} s")
    for stage in plan.stages:
        if stage.source is not None:
            yield _line("upsample", spec.refinement.upsampler or f"{spec.checkpoint}, its own upsampler")
        if stage.network == REFINER:
            yield from (_line("lora", lora) for lora in spec.refinement.lora or ())
            yield _line("held", held(plan))
        passes = ", ".join(each.name.lower() for each in stage.passes)
        yield _line("denoise", f"{len(stage.sigmas) - 1} steps, passes: {passes}")
    yield _line("decode", _decoding(plan.decoding))
    yield _line("devices", f"{devices.size} {devices.flat[0].device_kind}, profile {spec.sharding.profile}")
    yield _line("seed", "random, for example " * random + ", ".join(map(str, plan.spec.seeds)))


def held(plan: Plan) -> str:
    """How a second stage's LoRAs are."""
    copied = holding(plan.networks) is Hold.copy
    how = "added to a second copy of weights" if copied else "as low-rank factors beside the weights"
    size = sum(bytes_on_device(weight, plan.sharding) for weight in refiners_own(plan.networks, plan.added))
    return f"{how}, {natural(size)} on a device"


def _decoding(decoding: Decoding) -> str:
    """How decoding is divided, as far as it is."""
    height, width = (decoding.mesh.shape[axis] for axis in IMAGE_AXES)
    parts = [f"{decoding.videos} videos at a time"] * (decoding.videos > 1)
    parts += [f"images in {height}x{width} parts"] * (height * width > 1)
    if decoding.tiles:
        parts.append("{}x{}x{} tiles of frames, height and width".format(*decoding.tiles.counts))
    return ", ".join([*parts, f"about {natural(decoding.bytes)} on a device"])


def _line(what: str, value: str) -> str:
    return f"{what:10}{value}"
