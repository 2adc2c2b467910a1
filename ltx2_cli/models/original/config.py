"""What the networks of a published single file are, read from the config in its metadata."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ltx2_cli.models.arch import PUBLISHED_SCHEDULE
from ltx2_cli.models.config import Config, NetworkArch
from ltx2_cli.models.original.sections import described, refuse, section_of
from ltx2_cli.models.original.sound import read_audio_vae, read_vocoder
from ltx2_cli.models.original.transformer import OriginalTransformer
from ltx2_cli.models.original.video import read_video_vae
from ltx2_cli.spec import SpecError
from ltx2_cli.weights.findings import attempt


def original_archs(
    config: Config, text_features: Callable[[], int], where: str
) -> tuple[dict[str, NetworkArch], list[SpecError]]:
    """What the networks of a single file are, by the `config` in its metadata, and what is wrong with the others.

    `text_features` tells how many numbers of a token the connectors project, or raises `SpecError`; `where` names the
    file in errors: those of what a section lacks, and of the values in it that are not implemented.
    """
    sections: dict[str, Callable[[], Any]] = {
        "transformer": partial(_read_transformer, config, where),
        "vae": partial(read_video_vae, config, where),
        "audio_vae": partial(read_audio_vae, config, where),
    }
    read, problems = attempt(sections)
    transformer, vae, audio_vae = (read.get(name) for name in sections)
    makers: dict[str, Callable[[], NetworkArch]] = {}
    if transformer and vae and audio_vae:
        makers["transformer"] = partial(transformer.transformer, vae, audio_vae)
    if transformer:
        makers["connectors"] = lambda: transformer.connectors(text_features())
    if vae:
        makers["vae"] = lambda: vae
    if audio_vae:
        makers |= {"audio_vae": lambda: audio_vae, "vocoder": partial(read_vocoder, config, audio_vae, where)}
    archs, conflicts = attempt({name: partial(_sound, make, f"{where}, {name}") for name, make in makers.items()})
    # The section that the files have for the schedule describes that of an older model.
    return archs | {"scheduler": PUBLISHED_SCHEDULE}, [*problems, *conflicts]


def _read_transformer(config: Config, where: str) -> OriginalTransformer:
    return described(OriginalTransformer, section_of(config, where, "transformer"), f"{where}, transformer")


def _sound(make: Callable[[], NetworkArch], where: str) -> NetworkArch:
    """A network whose values go together; raises `SpecError` where they do not."""
    network = make()
    refuse(network.conflicts(), where)
    return network
