"""A published single file: all networks but the text encoder in one, under the names they were trained with."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ltx2_cli.errors import UsageError
from ltx2_cli.models.config import LTX2, LTX2_3, Config
from ltx2_cli.models.ltx_native.config import config_problems
from ltx2_cli.models.ltx_native.names import RENAMINGS, video_vae_renaming
from ltx2_cli.models.networks import ARCHS, BUILDERS, Checkpoint
from ltx2_cli.models.parsed_checkpoint import ParsedCheckpoint
from ltx2_cli.models.published import PRESETS
from ltx2_cli.weights.checkpoint import AGAIN, TensorFiles, collect, raise_all
from ltx2_cli.weights.declare import Scope, declared

UNREAD = re.compile(r"(audio_)?vae\.per_channel_statistics\..*")  # more of them than normalising takes
MODULATION = "model.diffusion_model.prompt_adaln_single.linear.weight"  # of the text: in LTX-2.3 alone
LATER_VERSIONS = (2, 3)  # the first of them
TEXT_HINT = "--text-encoder FOLDER or REPO names the Gemma-3 that the model was trained with"


def open_single_file(path: Path, text: ParsedCheckpoint) -> Checkpoint:
    """The checkpoint in `path`, with a text encoder from elsewhere.

    Raises `UsageError` with all that is missing, damaged, not implemented, or does not belong together.
    """
    return read_single_file(path, text).checkpoint()


def read_single_file(path: Path, text: ParsedCheckpoint) -> ParsedCheckpoint:
    """What `path` holds, and beside it `text`: the networks of the published model whose tensors it has.

    Raises `UsageError` where its header cannot be read, or has no config.
    """
    of_text = [
        UsageError(str(problem), TEXT_HINT if problem.hint == AGAIN else problem.hint) for problem in text.problems
    ]
    opened, problems = collect({"file": partial(TensorFiles, path.parent, (path.stem,))})
    configs, bare = collect({name: partial(_config, file, path) for name, file in opened.items()})
    if not configs:
        raise_all([*problems, *bare, *of_text])
    file, config = opened["file"], configs["file"]
    version = LTX2_3 if MODULATION in file else LTX2
    # The reference for these files perturbs attention whenever it is asked to, without a key for it.
    arch = replace(PRESETS[version], transformer=replace(PRESETS[version].transformer, perturbed_attn=True))
    problems = [*config_problems(config, version, str(path)), *_other_version(file, version, path), *of_text]
    archs = dict(zip(ARCHS, vars(arch).values(), strict=True))
    files = _parts(file, archs) | text.files
    return ParsedCheckpoint(path, archs | text.archs, files, text.prefix, text.tokenizer, problems, TEXT_HINT)


def _parts(file: TensorFiles, archs: dict[str, Any]) -> dict[str, TensorFiles]:
    """The tensors of each network, under the names that it declares."""
    stages = len(archs["vae"].block_out_channels), len(archs["vae"].decoder_block_out_channels)
    renamings = RENAMINGS | {"vae": video_vae_renaming(*stages)}
    names = {
        name: renamings[name].originals(declared(build(Scope("float32"), archs[name])))
        for name, build in BUILDERS.items()
    }
    claimed = {native for table in names.values() for native in table.values()}
    # What no network claims is shown to one of them, whose check will say that it is not known.
    names["transformer"] |= {name: name for name in file if name not in claimed and not UNREAD.fullmatch(name)}
    return {name: file.renamed(table) for name, table in names.items()}


def _config(file: TensorFiles, path: Path) -> Config:
    if (config := file.config(absent="")) is None:
        raise UsageError(f"{path} has no config in its metadata: it is not one of the published single files", AGAIN)
    return config


def _other_version(file: TensorFiles, version: str, path: Path) -> Iterator[UsageError]:
    """A model version in the metadata that is not that of the tensors."""
    stated = file.metadata().get("model_version", "")
    numbers = tuple(int(number) for number in re.split("[.-]", stated) if number.isdecimal())
    if numbers and (numbers >= LATER_VERSIONS) != (version == LTX2_3):
        yield UsageError(f"{path}: model_version is {stated!r}, the transformer in it is of {version}", AGAIN)
