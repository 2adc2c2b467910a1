"""The text of compiled programs on disk."""

from pathlib import Path

from ltx2_cli.forecast.forecast import Forecast


def write_hlo(forecast: Forecast, folder: Path) -> list[Path]:
    """The optimised HLO of each program that was compiled, in a file of its own there: `forward.hlo` for one."""
    paths = []
    for program in forecast.compiled:
        path = folder / f"{program.name.replace(' ', '_')}.hlo"
        unfinished = path.with_name(f".{path.name}.part")
        unfinished.write_text(program.text)
        unfinished.replace(path)
        paths.append(path)
    return paths
