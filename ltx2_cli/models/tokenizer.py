"""Prompts to token ids, by the tokenizer that lies beside the checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ltx2_cli.errors import UsageError
from ltx2_cli.weights.checkpoint import AGAIN, read_json

OPTIONAL = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


class Tokens(NamedTuple):
    """Prompts as the text encoder reads them, padded on the left."""

    ids: np.ndarray  # int32 [prompts, tokens]
    mask: np.ndarray  # bool [prompts, tokens], true at the prompt's own tokens
    lengths: tuple[int, ...]  # tokens of each prompt before truncation

    @property
    def truncated(self) -> tuple[bool, ...]:
        """Which prompts lost their end."""
        return tuple(length > self.ids.shape[1] for length in self.lengths)


def check_tokenizer(folder: Path) -> None:
    """Raise `UsageError` unless the files of a checkpoint's `tokenizer/` are there and JSON: that is cheap enough to
    find a broken one before a weight is read."""
    for path in [folder / "tokenizer.json", *filter(Path.exists, (folder / name for name in OPTIONAL))]:
        read_json(path)


def tokenise(folder: Path, prompts: Sequence[str], max_length: int) -> Tokens:
    """Token ids of `prompts`, without white space at their ends, cut and padded on the left to `max_length`.

    `folder` is a checkpoint's `tokenizer/`: its files say which special tokens stand around a prompt. Raises
    `UsageError` where transformers cannot read them.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    except Exception as error:  # what its parser in Rust raises is of this class itself
        reason = " ".join(str(error).split())
        raise UsageError(f"{folder} holds no tokenizer that transformers can read: {reason}", AGAIN) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    texts = [prompt.strip() for prompt in prompts]
    lengths = tuple(len(ids) for ids in tokenizer(texts, verbose=False)["input_ids"])
    cut = tokenizer(texts, padding="max_length", truncation=True, max_length=max_length, return_tensors="np")
    return Tokens(cut["input_ids"].astype(np.int32), cut["attention_mask"].astype(bool), lengths)
