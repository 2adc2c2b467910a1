"""`ltx2 doctor`: check this machine."""

from dataclasses import dataclass

from ltx2_cli.cli.options import Json, Options
from ltx2_cli.cli.registry import SET_UP, command


@command("doctor", SET_UP)
@dataclass(kw_only=True)
class Doctor(Options):
    """Check installation, disks and devices; each problem comes with a fix. Exit code 1 if something is broken.

    ltx2 doctor
    ltx2 doctor --json
    """

    as_json: Json = False

    def run(self) -> None:
        """Print a line for each check."""
        from ltx2_cli.runs.doctor import doctor

        doctor(self.as_json)
