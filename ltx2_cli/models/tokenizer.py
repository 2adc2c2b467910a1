"""The tokenizer of a text encoder: prompts to token ids, and chats with an instructed language model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Self

import numpy as np

from ltx2_cli.errors import UsageError
from ltx2_cli.weights.checkpoint import AGAIN, TensorFiles, read_json

TOKENIZER, TOKENIZER_TENSOR, ASSET = "tokenizer.json", "tokenizer_json", "hf_asset__"  # the file; its name in another
OPTIONAL_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")  # of a tokenizer
TOKENIZER_CLASSES = {  # of transformers, by the name in a config
    **dict.fromkeys(("GemmaTokenizer", "GemmaTokenizerFast"), "GemmaTokenizer"),
    **dict.fromkeys(("TokenizersBackend", "PreTrainedTokenizerFast"), "TokenizersBackend"),
}
TURN, END_OF_TURN = "<start_of_turn>", "<end_of_turn>"  # tokens of chats


class Tokens(NamedTuple):
    """Prompts as the text encoder reads them, padded on the left."""

    ids: np.ndarray  # int32 [prompts, tokens]
    mask: np.ndarray  # bool [prompts, tokens], true at the prompt's own tokens
    truncated: tuple[bool, ...]  # which prompts lost their end


def check_tokenizer(place: Path) -> None:
    """Raise `UsageError` unless the files of a checkpoint's `tokenizer/`, or those in the file of a text encoder, are
    there and JSON: that is cheap enough to find a broken one before a weight is read."""
    with _unpacked(place) as folder:
        for path in [folder / TOKENIZER, *filter(Path.exists, (folder / name for name in OPTIONAL_FILES))]:
            read_json(path, place / path.name)


@contextmanager
def _unpacked(place: Path) -> Iterator[Path]:
    """The folder of a tokenizer: `place` itself, or for as long as it is needed that of the files inside a file."""
    if not place.is_file():
        yield place
        return
    files = TensorFiles(place)
    if TOKENIZER_TENSOR not in files:
        raise UsageError(f"{place} holds no tokenizer: no tensor `{TOKENIZER_TENSOR}`", AGAIN)
    inside = {TOKENIZER: TOKENIZER_TENSOR} | {name: f"{ASSET}{name}" for name in OPTIONAL_FILES}
    with TemporaryDirectory() as folder:
        for name, tensor in inside.items():
            if tensor in files:
                (Path(folder) / name).write_bytes(files.read(tensor, (slice(None),)).tobytes())
        yield Path(folder)


def tokenise(place: Path, prompts: Sequence[str], max_length: int) -> Tokens:
    """Token ids of `prompts`, without white space at their ends, cut and padded on the left to `max_length`. `place` is
    a checkpoint's `tokenizer/`, or the file of a text encoder: what is there says which special tokens stand around a
    prompt; the one that begins a text always does. Raises `UsageError` where transformers cannot read it."""
    tokenizer, texts = _open(place), [prompt.strip() for prompt in prompts]
    if tokenizer.bos_token and tokenizer("")["input_ids"][:1] != [tokenizer.bos_token_id]:
        texts = [tokenizer.bos_token + text for text in texts]
    truncated = tuple(len(ids) > max_length for ids in tokenizer(texts, verbose=False)["input_ids"])
    cut = tokenizer(texts, padding="max_length", truncation=True, max_length=max_length, return_tensors="np")
    return Tokens(cut["input_ids"].astype(np.int32), cut["attention_mask"].astype(bool), truncated)


def _open(place: Path) -> Any:
    """The tokenizer of transformers at `place`. Raises `UsageError` where it cannot read it."""
    try:
        with _unpacked(place) as folder:
            tokenizer = _class(folder).from_pretrained(folder, local_files_only=True, padding_side="left")
    except Exception as error:  # what its parser in Rust raises is of this class itself
        reason = " ".join(str(error).split())
        raise UsageError(f"{place} holds no tokenizer that transformers can read: {reason}", AGAIN) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _class(folder: Path) -> Any:
    """The class that transformers finds for a folder. What finds it imports torch, these classes do not."""
    import transformers

    config = folder / OPTIONAL_FILES[0]
    stated = read_json(config, config).get("tokenizer_class") if config.is_file() else None
    return getattr(transformers, TOKENIZER_CLASSES.get(str(stated), "AutoTokenizer"))


@dataclass(frozen=True)
class Chat:
    """The format of chats with an instructed Gemma-3, by its tokenizer."""

    tokenizer: Any = field(repr=False)
    stops: tuple[int, ...]  # tokens that end an answer

    @classmethod
    def of(cls, place: Path) -> Self:
        """By the tokenizer at `place`. Raises `UsageError` for one without tokens for turns."""
        tokenizer, vocabulary = (opened := _open(place)), opened.get_vocab()
        if lacking := [token for token in (TURN, END_OF_TURN) if token not in vocabulary]:
            raise UsageError(
                f"the text encoder follows no instructions: its tokenizer has no {lacking[0]}",
                "a checkpoint with Gemma-3 and its tokenizer",
            )
        return cls(tokenizer, tuple({vocabulary[END_OF_TURN], tokenizer.eos_token_id}))

    def question(self, text: str) -> np.ndarray:
        """A user's turn with a text, and the beginning of the answer, int32 [tokens]."""
        turns = f"{self.tokenizer.bos_token}{TURN}user\n{text.strip()}{END_OF_TURN}\n{TURN}model\n"
        return np.array(self.tokenizer(turns, add_special_tokens=False)["input_ids"], np.int32)

    def text(self, ids: np.ndarray) -> str:
        """The text of tokens, without special ones."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))
