"""Noise levels (sigmas) from 1 to 0: a shifted line with a fixed last level above zero, as LTX-2 uses."""

from dataclasses import dataclass

import numpy as np

from ltx2_cli.request.validation import MAX_STEPS


@dataclass(frozen=True)
class Schedule:
    """Spacing of a checkpoint's noise levels; names and defaults as in its scheduler's config."""

    use_dynamic_shifting: bool = False
    shift: float = 1.0  # where shifting is not dynamic
    base_shift: float = 0.5
    max_shift: float = 1.15
    base_image_seq_len: int = 256
    max_image_seq_len: int = 4096
    shift_terminal: float | None = None

    def shift_factor(self, tokens: int) -> float:
        """The shift for so many tokens: e^μ, with μ on a line through the two anchors, not clamped."""
        if not self.use_dynamic_shifting:
            return self.shift
        slope = (self.max_shift - self.base_shift) / (self.max_image_seq_len - self.base_image_seq_len)
        return float(np.exp(self.base_shift + slope * (tokens - self.base_image_seq_len)))

    def sigmas(self, steps: int, tokens: int) -> np.ndarray:
        """Noise levels float32 [steps + 1], from 1 to 0: s' = shift / (shift + 1/s − 1), then 1 − s' is scaled so that
        the last s' above zero is `shift_terminal`."""
        line = np.linspace(1, 1 / steps, steps)
        shift = self.shift_factor(tokens)
        sigmas = shift / (shift + 1 / line - 1)
        if self.shift_terminal and sigmas[-1] < 1:  # 0 means none, as in the reference
            sigmas = 1 - (1 - sigmas) * (1 - self.shift_terminal) / (1 - sigmas[-1])
        return np.append(sigmas, 0).astype(np.float32)


def pad_sigmas(sigmas: np.ndarray) -> np.ndarray:
    """`sigmas` padded to a fixed length: another number of steps needs no other program."""
    return np.pad(sigmas, (0, MAX_STEPS + 1 - len(sigmas)))
