import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, processors
from transformers import AutoTokenizer

from benchmarks.spelling import BYTE_VOCABULARY, byte_tokenizer
from ltx2_cli.errors import UsageError
from ltx2_cli.models.tokenizer import TOKENIZER_CLASSES, check_tokenizer, tokenise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tokenizer"
    byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def gemma_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that names Gemma's own class, as the published one does, and has no padding token."""
    folder = tmp_path_factory.mktemp("gemma")
    vocabulary = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", "a", "b", "ab"]
    model = models.BPE({token: place for place, token in enumerate(vocabulary)}, merges=[("a", "b")], unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "GemmaTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_tokens_are_padding_bos_and_bytes(folder):
    tokens = tokenise(folder, ["Aé"], 6)
    assert tokens.ids.dtype == np.int32
    np.testing.assert_array_equal(tokens.ids, [[0, 0, 2, 3 + 0x41, 3 + 0xC3, 3 + 0xA9]])
    np.testing.assert_array_equal(tokens.mask, [[False, False, True, True, True, True]])


def test_white_space_around_a_prompt_is_dropped_and_the_empty_prompt_is_legal(folder):
    tokens = tokenise(folder, [" a b\n", "a b", ""], 5)
    np.testing.assert_array_equal(tokens.ids[0], tokens.ids[1])
    np.testing.assert_array_equal(tokens.ids[2], [0, 0, 0, 0, 2])
    assert tokens.mask.sum(axis=1).tolist() == [4, 4, 1]


def test_a_long_prompt_is_cut_and_reported(folder):
    tokens = tokenise(folder, ["abcdef", "abc"], 4)
    np.testing.assert_array_equal(tokens.ids[0], tokens.ids[1])
    assert tokens.truncated == (True, False)


@pytest.mark.parametrize("text", ["Ünï ▁ <0x41> 𝄞", "a\x00b", "東京", "".join(map(chr, range(1, 256)))])
def test_any_text_goes_through_the_byte_tokenizer(folder, text):
    tokens = tokenise(folder, [text], 600)
    ids = tokens.ids[tokens.mask]
    assert bytes((ids[1:] - 3).astype(np.uint8)) == text.strip().encode()
    assert ids.max() < BYTE_VOCABULARY
    assert AutoTokenizer.from_pretrained(folder).decode(ids, skip_special_tokens=True) == text.strip()


def test_the_special_tokens_are_the_published_ids(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)
    assert len(tokenizer) == BYTE_VOCABULARY


def test_gemmas_own_class_puts_bos_in_front(gemma_like):
    tokens = tokenise(gemma_like, ["ab a"], 6)
    np.testing.assert_array_equal(tokens.ids[tokens.mask], [2, 8, 5, 6])


@pytest.mark.parametrize("name", [*TOKENIZER_CLASSES, "AutoTokenizer"])
def test_classes_are_those_that_transformers_finds(folder, tmp_path, name):
    """In folders that state them or none, found without the import of torch."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": name, "backend": None}
    if name not in TOKENIZER_CLASSES:
        del config["tokenizer_class"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    texts, length = ["ab a\n", "東 <bos> é", ""], 24
    found = AutoTokenizer.from_pretrained(tmp_path, padding_side="left")
    assert name not in TOKENIZER_CLASSES or type(found).__name__ == TOKENIZER_CLASSES[name]
    stripped = [text.strip() for text in texts]
    wanted = found(stripped, padding="max_length", truncation=True, max_length=length, return_tensors="np")
    np.testing.assert_array_equal(tokenise(tmp_path, texts, length).ids, wanted["input_ids"])


def test_bos_is_in_front_where_a_tokenizer_puts_none(gemma_like, tmp_path):
    bare = shutil.copytree(gemma_like, tmp_path / "bare")
    tokenizer = Tokenizer.from_file(str(bare / "tokenizer.json"))
    tokenizer.post_processor = processors.Sequence([])
    tokenizer.save(str(bare / "tokenizer.json"))
    (bare / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "pad_token": "<pad>"})
    )
    tokens = tokenise(bare, ["ab", ""], 3)
    np.testing.assert_array_equal(tokens.ids, [[0, 2, 8], [0, 0, 2]])


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UsageError, match="nowhere"):
        tokenise(tmp_path / "nowhere", ["a"], 4)


def test_complete_tokenizers_are_accepted(folder, gemma_like):
    check_tokenizer(folder)
    check_tokenizer(gemma_like)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
        ("tokenizer.json", '{"version": "1.0", "model":', "tokenizer.json is not JSON"),
        ("tokenizer.json", "[]", "tokenizer.json is not a JSON object"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("special_tokens_map.json", "version https://git-lfs", "special_tokens_map.json is a Git LFS pointer"),
    ],
)
def test_a_broken_file_is_named_without_loading_the_tokenizer(folder, tmp_path, name, content, sentence):
    broken = shutil.copytree(folder, tmp_path / "broken")
    if content is None:
        (broken / name).unlink()
    else:
        (broken / name).write_text(content)
    with pytest.raises(UsageError, match=sentence) as caught:
        check_tokenizer(broken)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("content", "raised"),
    [
        ("{}", KeyError),
        ('{"version": "1.0", "added_tokens": [], "model": {"type": "Nope"}}', Exception),
        (None, ValueError),
    ],
    ids=["no model", "a model that the parser does not know", "no file"],
)
def test_a_tokenizer_unreadable_by_transformers_is_an_error_of_one_sentence(folder, tmp_path, content, raised):
    broken = shutil.copytree(folder, tmp_path / "broken")
    if content is None:
        (broken / "tokenizer.json").unlink()
    else:
        (broken / "tokenizer.json").write_text(content)
    with pytest.raises(UsageError, match=r"broken holds no tokenizer that transformers can read: .") as caught:
        tokenise(broken, ["a"], 4)
    assert type(caught.value.__cause__) is raised
    assert "\n" not in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"weight": b"00"}, "holds no tokenizer: no tensor `tokenizer_json`"),
        ({"tokenizer_json": b"{"}, "/tokenizer.json is not JSON"),
        ({"tokenizer_json": b"{}", "hf_asset__tokenizer_config.json": b"[]"}, "/tokenizer_config.json is not a JSON"),
    ],
)
def test_a_broken_tokenizer_in_the_file_of_a_text_encoder_is_named_by_that_file(
    tmp_path: Path, tensors: dict[str, bytes], sentence: str
) -> None:
    file = tmp_path / "encoder.safetensors"
    save_file({name: np.frombuffer(text, np.uint8) for name, text in tensors.items()}, file)
    with pytest.raises(UsageError) as caught:
        check_tokenizer(file)
    assert str(caught.value).startswith(str(file))
    assert sentence in str(caught.value)
