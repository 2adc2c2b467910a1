"""The networks on the devices: each is loaded when its phase begins and, unless kept resident, dropped after it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flax import nnx

from ltx2_cli.core.report import Report
from ltx2_cli.plan import Plan
from ltx2_cli.spec import NotFiniteError, RunError
from ltx2_cli.weights.findings import some
from ltx2_cli.weights.load import Placement, load, not_finite


class Components:
    """A plan's networks with their weights, by the names of its `networks`: `with components.use("vae", report)`."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.resident: dict[str, nnx.Module] = {}

    @contextmanager
    def use(self, name: str, report: Report) -> Iterator[Any]:
        """The network `name`, loaded now unless it is resident.

        Raises `RunError` that names its tensors which are not finite if the body finds that what it made is not.
        """
        module = self.resident.get(name)
        if module is None:
            with report.stage(f"load {name.replace('_', ' ')}"):
                module = load(
                    getattr(self.plan.networks, name),
                    self.plan.checkpoint.files[name],
                    self._placement(name),
                    self.plan.added.get(name),
                )
        if self.plan.spec.keep_resident:
            self.resident[name] = module
        try:
            yield module
        except NotFiniteError as error:
            if broken := not_finite(module):
                file, found = self.plan.checkpoint.files[name][broken[0]].file, "; ".join(some("not finite", broken))
                raise RunError(f"the {name} in {file} is damaged: {found}", "download it again") from error
            raise

    def _placement(self, name: str) -> Placement:
        sharding = self.plan.sharding
        whole = name in ("vae", "audio_vae", "vocoder") and self.plan.spec.sharding.replicate_vae
        return (lambda axes: sharding.replicated) if whole else sharding.weight
