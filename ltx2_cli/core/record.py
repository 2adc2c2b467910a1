"""What a record says besides the request, as it is made: of which files, on which devices, what each stage left."""

from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ltx2_cli.core.made_with import FINAL, FIRST, PACKAGES, UPSAMPLED
from ltx2_cli.diffusion.fingerprints import SKETCH, fingerprint
from ltx2_cli.diffusion.latents import LatentsFile, unpack
from ltx2_cli.plan import Plan
from ltx2_cli.spec import AV
from ltx2_cli.stages import Stage

History = tuple[Mapping[str, Any], ...]  # of each video, what its record says of latents: those it began with and made


def begun(file: LatentsFile, fps: float) -> Mapping[str, Any]:
    """The history of a video that goes on from latents of so many frames a second."""
    return {"source": {"file": str(file.path.absolute()), "sha256": file.sha256(), "fps": fps}}


def continued(history: History, plan: Plan, stage: Stage, tokens: AV[np.ndarray]) -> History:
    """With the latents of each video that a stage left, as tokens."""
    latents = unpack(tokens, stage.shapes)
    name, rows = stage_name(plan, stage), range(len(tokens.video))
    left = [{each: fingerprint(stream[row]).values() for each, stream in latents._asdict().items()} for row in rows]
    before = history or ({},) * len(left)
    return tuple(
        {**one, "latents": {**one.get("latents", {}), name: each}} for one, each in zip(before, left, strict=True)
    )


def made_with(plan: Plan, files: Mapping[str, str], history: Mapping[str, Any]) -> dict[str, Any]:
    """What the record of a video says that was made here."""
    meshes = {stage_name(plan, stage): stage.sharding.text for stage in plan.stages}
    here = {"devices": devices(), "meshes": meshes, "at_once": plan.spec.num_videos}
    return {**versions(), **here, "files": dict(files), **history}


def without_sketches(history: Mapping[str, Any]) -> dict[str, Any]:
    """The history of a video as people read it: without the sketches of its latents, which are long and say by how much
    others differ. The video has them."""
    stages = {
        stage: {
            name: {key: value for key, value in stream.items() if key != SKETCH} for name, stream in streams.items()
        }
        for stage, streams in history.get("latents", {}).items()
    }
    return {**history, "latents": stages}


def versions() -> dict[str, str]:
    """Of what decides how a clip is computed."""
    return {package: version(package) for package in PACKAGES}


def devices() -> str:
    """All that there are: how many, of which kind."""
    return f"{jax.device_count()} {jax.devices()[0].device_kind}"


def stage_name(plan: Plan, stage: Stage) -> str:
    """What the latents are that a stage leaves."""
    if stage.source is None:
        return FIRST if plan.spec.refinement.sigmas else FINAL
    return FINAL if len(stage.sigmas) > 1 else UPSAMPLED


def input_files(plan: Plan) -> Collection[Path]:
    """Every file that the clips depend on, but for configs, tokenizers and latents."""
    networks = {*plan.checkpoint.files, *plan.added}
    weights = {file for network in networks for file in network_files(plan, network)}
    return sorted(weights | ({Path(plan.spec.noise).expanduser()} if plan.spec.noise else set()))


def network_files(plan: Plan, network: str) -> Collection[Path]:
    """The files of a network's weights and of what is added to them."""
    weights = {tensor.file for tensor in plan.checkpoint.files.get(network, {}).values()}
    return weights | {part.lora.path for lora in plan.added.get(network, {}).values() for part in lora.parts}
