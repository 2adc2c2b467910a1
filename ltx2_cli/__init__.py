"""Video with sound from text: LTX-2 in JAX.

spec = read_spec(model="demo", prompt="a red ball bounces")
plan = resolve(spec)
components = load(plan)
for media in run(plan, components):
    media.frames, media.waveform
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ltx2_cli.core.run import run
    from ltx2_cli.estimate.fit import load
    from ltx2_cli.media.clip import Media
    from ltx2_cli.media.write import write_mp4
    from ltx2_cli.plan.resolve import resolve
    from ltx2_cli.request.profiles import read_spec
    from ltx2_cli.runs.jobs import BatchSettings
    from ltx2_cli.runs.library import resume_run, run_jobs, run_request
    from ltx2_cli.runs.pipeline import LTX2
    from ltx2_cli.runs.settings import RunSettings

__version__ = "0.1.0"
__all__ = [
    "LTX2",
    "BatchSettings",
    "Media",
    "RunSettings",
    "__version__",
    "load",
    "read_spec",
    "resolve",
    "resume_run",
    "run",
    "run_jobs",
    "run_request",
    "write_mp4",
]

_HOMES = {"read_spec": "request.profiles", "resolve": "plan.resolve", "load": "estimate.fit", "run": "core.run"}
_HOMES |= {"Media": "media.clip", "write_mp4": "media.write"}
_HOMES |= {"LTX2": "runs.pipeline"}
_HOMES |= {"BatchSettings": "runs.jobs", "RunSettings": "runs.settings"}
_HOMES |= dict.fromkeys(("run_request", "resume_run", "run_jobs"), "runs.library")


def __getattr__(name: str) -> Any:
    """Import jax and its kin only when something that needs them is asked for: `ltx2 --help` is not."""
    if name not in _HOMES:
        raise AttributeError(f"module `ltx2_cli` has no attribute `{name}`")
    return getattr(import_module(f"ltx2_cli.{_HOMES[name]}"), name)
