"""The tokenizer of the small world: a token a word, whatever its case; one for all words that no caption has."""

from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tools.train_demo.captions import vocabulary

TEXT_TOKENS = 32  # of a caption; longer ones are cut
PAD, EOS, BOS, UNKNOWN = "<pad>", "<eos>", "<bos>", "<unk>"
# Of words that an earlier vocabulary lacks, the one whose meaning each begins with in further training.
LIKE = {
    **dict.fromkeys(("moving", "going", "travelling"), "moves"),
    **dict.fromkeys(("rolls", "rolling", "sliding", "flies", "flying"), "slides"),
    **dict.fromkeys(("falling", "drops", "dropping"), "falls"),
    **dict.fromkeys(("circling", "orbiting"), "orbits"),
    **dict.fromkeys(("hops", "hopping", "jumping"), "bounces"),
    **dict.fromkeys(("expands", "expanding"), "grows"),
    **dict.fromkeys(("sphere", "dot"), "ball"),
    **dict.fromkeys(("standing", "staying", "resting"), "rests"),
    "an": "a",
    "becoming": "becomes",
    "getting": "gets",
    "center": "centre",
    "cube": "box",
    "floating": "floats",
    "gray": "grey",
    "huge": "large",
    "rising": "rises",
    "sinking": "sinks",
    "tiny": "small",
    "turquoise": "cyan",
    "violet": "purple",
}
VOCABULARY = (PAD, EOS, BOS, UNKNOWN, *vocabulary())


def tokenizer() -> Tokenizer:
    """`<bos>`, then a token for each word."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(VOCABULARY)}, UNKNOWN))
    words.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(Regex("[.!?;:]"), " ")])
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, VOCABULARY.index(BOS))]
    )
    return words


def write_tokenizer(folder: Path) -> None:
    """Write a checkpoint's `tokenizer/`."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), pad_token=PAD, eos_token=EOS, bos_token=BOS, unk_token=UNKNOWN
    )
    fast.save_pretrained(folder)


@cache
def _padding() -> Tokenizer:
    words = tokenizer()
    words.enable_truncation(TEXT_TOKENS)
    words.enable_padding(direction="left", pad_id=VOCABULARY.index(PAD), pad_token=PAD, length=TEXT_TOKENS)
    return words


def tokens(captions: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 and mask bool of captions, [captions, TEXT_TOKENS], padded on the left."""
    encoded = _padding().encode_batch(captions)
    return (
        np.asarray([each.ids for each in encoded], np.int32),
        np.asarray([each.attention_mask for each in encoded], bool),
    )
