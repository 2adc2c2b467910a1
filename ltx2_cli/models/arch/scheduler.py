"""The noise levels, which a checkpoint states like a network."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ltx2_cli.diffusion.schedule import Schedule
from ltx2_cli.models.config import Config, NetworkArch


@dataclass(frozen=True)
class SchedulerArch(Schedule, NetworkArch):
    """The noise levels a checkpoint was made for."""

    only: ClassVar[Config] = {
        "num_train_timesteps": 1000,
        "time_shift_type": "exponential",
        "invert_sigmas": False,
        "use_karras_sigmas": False,
        "use_exponential_sigmas": False,
        "use_beta_sigmas": False,
        "stochastic_sampling": False,
    }
    signed: ClassVar[frozenset[str]] = frozenset({"base_shift", "max_shift", "shift_terminal"})

    def conflicts(self) -> Iterator[str]:
        if not 0 <= (self.shift_terminal or 0) < 1:
            yield f"shift_terminal is {self.shift_terminal}, only from 0 to below 1 is"
        if self.base_image_seq_len == self.max_image_seq_len:
            yield "base_image_seq_len and max_image_seq_len are equal"


PUBLISHED_SCHEDULE = SchedulerArch(
    use_dynamic_shifting=True,
    base_shift=0.95,
    max_shift=2.05,
    base_image_seq_len=1024,
    max_image_seq_len=4096,
    shift_terminal=0.1,
)
