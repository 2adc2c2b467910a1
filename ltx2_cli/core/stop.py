"""The request to stop a run after its step."""

from dataclasses import dataclass


@dataclass
class StopRequest:
    """Whether a run is to stop after its step. It is asked by a thread that hears signals."""

    listening: bool = False  # the run stops after its step if it is asked to; else ending it at once loses no more
    requested: bool = False

    def ask(self) -> bool:
        """Ask for a stop; whether that is new and the run listens."""
        if self.requested or not self.listening:
            return False
        self.requested = True
        return True
