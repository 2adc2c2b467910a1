"""A tokenizer for tiny models that any text goes through."""

from pathlib import Path

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
BYTE_VOCABULARY = 3 + 256  # the special tokens, then every byte


def byte_tokenizer(folder: Path) -> None:
    """Write a `tokenizer/` that any text goes through: `<bos>`, then a token for each byte of UTF-8.

    The ids: 0 `<pad>`, 1 `<eos>`, 2 `<bos>`, and 256 more for the bytes.
    """
    from tokenizers import Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    letters = (f"<0x{byte:02X}>" for byte in range(256))
    vocabulary = {token: place for place, token in enumerate((PAD, EOS, BOS, *letters))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, bos_token=BOS)
    fast.save_pretrained(folder)
