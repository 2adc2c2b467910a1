"""The two layouts of a checkpoint on disk: diffusers' folder with a folder for each network, and a published single
file, which holds all networks but the text encoder, under the names they were trained with.

What was read must belong together: networks to each other, tensors to their network.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from flax import nnx

from ltx2_cli.errors import UsageError
from ltx2_cli.models.arch import Arch
from ltx2_cli.models.config import LTX2, LTX2_3, RULES, Config, NetworkArch
from ltx2_cli.models.gemma import Gemma, check_tokenizer, checkpoint_prefix, gemma_arch, in_language_model
from ltx2_cli.models.ltx_native import RENAMINGS, config_problems, video_vae_renaming
from ltx2_cli.models.networks import BUILDERS, GEMMA, PRESETS, READERS, TEXT_ENCODER, Checkpoint
from ltx2_cli.weights.checkpoint import AGAIN, TensorFiles, collect, raise_all, read_json
from ltx2_cli.weights.declare import Scope, declared
from ltx2_cli.weights.load import mismatches

ONE_RELEASE = "take all networks from one release, or name another checkpoint: --model FOLDER or --model REPO"
TEXT_HINT = "--text-encoder FOLDER or REPO names the Gemma-3 that the model was trained with"
CONFIGS = {name: f"{name}/config.json" for name in READERS} | {"scheduler": "scheduler/scheduler_config.json"}
UNREAD = re.compile(r"(audio_)?vae\.per_channel_statistics\..*")  # more of them than normalising takes
MODULATION = "model.diffusion_model.prompt_adaln_single.linear.weight"  # of the text: in LTX-2.3 alone
LATER_VERSIONS = (2, 3)  # the first of them


@dataclass(frozen=True)
class ParsedCheckpoint:
    """What could be read of a checkpoint, and why the rest could not."""

    where: Path
    archs: dict[str, Any]  # what each network is, by its config
    files: dict[str, TensorFiles]
    tokenizer: Path
    problems: list[UsageError]
    text_hint: str = AGAIN  # what to do where the text encoder is the wrong one

    def check(self) -> None:
        """Raise `UsageError` with everything that is wrong, as far as what was read tells."""
        misfits = [*self._sizes(), *self._tensors()]
        if misfits:
            heading = f"{self.where} does not hold what its configs describe"
            misfits[0] = UsageError(f"{heading}. {misfits[0]}", misfits[0].hint)
        raise_all([*self.problems, *self._model_versions(), *misfits])

    def checkpoint(self) -> Checkpoint:
        """The checkpoint, if nothing is wrong with it."""
        self.check()
        arch = Arch(*(self.archs[name] for name in READERS))
        return Checkpoint(self.where, arch, self.archs[TEXT_ENCODER], self.files, self.tokenizer)

    def _sizes(self) -> Iterator[UsageError]:
        """Sizes that are equal wherever networks were made for each other, and are not here."""
        for first, second, meaning in RULES["equal"]:
            places = [place.split(".", 1) for place in (first, second)]
            if all(network in self.archs for network, _ in places):
                size, other = (attrgetter(key)(self.archs[network]) for network, key in places)
                if size != other:
                    yield UsageError(f"{meaning} differ: {size} and {other}", self._hint(places[0][0]))

    def _model_versions(self) -> Iterator[UsageError]:
        """Networks that fit and yet mean nothing to each other: latents and spectra are learnt together."""
        known: dict[str, list[str]] = {}
        for name, arch in self.archs.items():
            if isinstance(arch, NetworkArch) and arch.model_version is not None:
                known.setdefault(arch.model_version, []).append(name)
        if len(known) > 1:
            versions = "; ".join(f"{model_version}: {', '.join(names)}" for model_version, names in known.items())
            mixed = f"{self.where} mixes networks of different model versions, which were not trained together"
            yield UsageError(f"{mixed} ({versions})", ONE_RELEASE)

    def _tensors(self) -> Iterator[UsageError]:
        """Tensors that are not what their network declares."""
        for name, files in self.files.items():
            if (arch := self.archs.get(name)) is not None:
                judged = partial(in_language_model, prefix=arch.prefix) if name == TEXT_ENCODER else lambda tensor: True
                for mismatch in mismatches(_abstract_network(name, arch), files, judged):
                    yield UsageError(f"{name}: {mismatch}", self._hint(name))

    def _hint(self, network: str) -> str:
        return self.text_hint if network == TEXT_ENCODER else AGAIN


# Built once for checkpoints of one kind: nobody changes them.
@lru_cache(maxsize=10)
def _abstract_network(name: str, arch: Any) -> nnx.Module:
    return (BUILDERS | {TEXT_ENCODER: Gemma})[name](Scope("float32"), arch)


def is_checkpoint(folder: Path) -> bool:
    """Whether `folder` has the config of any network of a checkpoint."""
    return any((folder / file).exists() for file in CONFIGS.values())


def open_folder(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`; raises `UsageError` with all that is missing, damaged, or does not belong
    together."""
    if not is_checkpoint(folder):
        raise UsageError(f"{folder} is no LTX-2 checkpoint: it holds none of {', '.join(CONFIGS.values())}", AGAIN)
    readings = {name: partial(_read_config, folder / CONFIGS[name], reader) for name, reader in READERS.items()}
    archs, bad_configs = collect(readings)
    tensors, bad_files = collect({name: partial(TensorFiles, folder / name) for name in BUILDERS})
    text = read_text_encoder(folder)
    problems = [*bad_configs, *bad_files, *text.problems]
    return ParsedCheckpoint(folder, archs | text.archs, text.files | tensors, text.tokenizer, problems).checkpoint()


def read_text_encoder(folder: Path) -> ParsedCheckpoint:
    """The text encoder in a folder of its own, or in that of a checkpoint in diffusers' layout, and its tokenizer."""
    inside = (folder / TEXT_ENCODER).is_dir()
    place, tokenizer = (folder / TEXT_ENCODER, folder / "tokenizer") if inside else (folder, folder)
    archs, bad_configs = collect({TEXT_ENCODER: partial(_read_config, place / "config.json", gemma_arch)})
    files, bad_files = collect({TEXT_ENCODER: partial(TensorFiles, place, ("model",))})
    prefixes, no_prefix = collect({name: partial(checkpoint_prefix, tensors) for name, tensors in files.items()})
    _, no_tokenizer = collect({"tokenizer": partial(check_tokenizer, tokenizer)})
    archs = {name: replace(arch, prefix=prefixes.get(name, "")) for name, arch in archs.items()}
    files = {name: files[name] for name in prefixes}
    return ParsedCheckpoint(folder, archs, files, tokenizer, [*bad_configs, *bad_files, *no_prefix, *no_tokenizer])


def preset_text_encoder() -> ParsedCheckpoint:
    """The published text encoder by its config alone."""
    where = Path(TEXT_ENCODER)
    return ParsedCheckpoint(where, {TEXT_ENCODER: gemma_arch(GEMMA, TEXT_ENCODER)}, {}, where, [])


def _read_config(path: Path, reader: Callable[[Config, str], Any]) -> Any:
    return reader(read_json(path), str(path))


def read_single_file(path: Path, text: ParsedCheckpoint) -> ParsedCheckpoint:
    """What `path` holds, and beside it `text`: the networks of the published model whose tensors it has. Raises
    `UsageError` where its header cannot be read, or has no config."""
    hints = {AGAIN: TEXT_HINT}
    text_problems = [UsageError(str(problem), hints.get(problem.hint, problem.hint)) for problem in text.problems]
    opened, problems = collect({"": partial(_open_file, path)})
    if problems:
        raise_all([*problems, *text_problems])
    file, config = opened[""]
    version = LTX2_3 if MODULATION in file else LTX2
    # The reference for these files perturbs attention whenever it is asked to, without a key for it.
    arch = replace(PRESETS[version], transformer=replace(PRESETS[version].transformer, perturbed_attn=True))
    archs = dict(zip(READERS, vars(arch).values(), strict=True))
    problems = [*config_problems(config, version, str(path)), *_other_version(file, version, path), *text_problems]
    files = _parts(file, archs) | text.files
    return ParsedCheckpoint(path, archs | text.archs, files, text.tokenizer, problems, TEXT_HINT)


def _open_file(path: Path) -> tuple[TensorFiles, Config]:
    file = TensorFiles(path)
    if (config := file.config(absent="")) is None:
        raise UsageError(f"{path} has no config in its metadata: it is not one of the published single files", AGAIN)
    return file, config


def _parts(file: TensorFiles, archs: dict[str, Any]) -> dict[str, TensorFiles]:
    """The tensors of each network, under the names that it declares."""
    stages = len(archs["vae"].block_out_channels), len(archs["vae"].decoder_block_out_channels)
    renamings = RENAMINGS | {"vae": video_vae_renaming(*stages)}
    networks = {name: build(Scope("float32"), archs[name]) for name, build in BUILDERS.items()}
    names = {name: renamings[name].originals(declared(network)) for name, network in networks.items()}
    claimed = {native for table in names.values() for native in table.values()}
    # What no network claims is shown to one of them, whose check will say that it is not known.
    names["transformer"] |= {name: name for name in file if name not in claimed and not UNREAD.fullmatch(name)}
    return {name: file.renamed(table) for name, table in names.items()}


def _other_version(file: TensorFiles, version: str, path: Path) -> Iterator[UsageError]:
    """A model version in the metadata that is not that of the tensors."""
    stated = file.metadata.get("model_version", "")
    numbers = tuple(int(number) for number in re.split("[.-]", stated) if number.isdecimal())
    if numbers and (numbers >= LATER_VERSIONS) != (version == LTX2_3):
        yield UsageError(f"{path}: model_version is {stated!r}, the transformer in it is of {version}", AGAIN)
