"""Prompts that the text encoder writes, through the command line."""

import io
import json
from pathlib import Path
from shutil import copytree

import jax
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import decoders
from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

from clips import TEXT_TOKENS, Checkpoint
from local_hub import local_hub
from ltx2_cli import LTX2
from ltx2_cli.core.enhance import MOST_TOKENS, clean_answer
from ltx2_cli.runs.enhance_settings import read_instructions
from program import cache_restored, run_program, signal_at
from tiny import tiny_pipeline

TURNS = ("<start_of_turn>", "<end_of_turn>")
VOCABULARY = 272
IDEAS = [f"{who} {what}" for who in ("a fox", "Ünï") for what in ("runs", "sings", "falls", "waits", "7")]
SMALL = ["--height", "64", "--width", "64", "--num-frames", "9", "--steps", "2", "--stg-blocks", "0", "--seed", "3"]


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer knows turns, and shows bytes by their numbers: few that are written are text. Its
    embeddings are small, else each token would follow itself."""
    folder = tmp_path_factory.mktemp("writer")
    tiny_pipeline(folder, changes={"text_encoder": {"vocab_size": VOCABULARY, "sliding_window": 6}})
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.add_special_tokens({"additional_special_tokens": TURNS})
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    tokenizer.save_pretrained(folder / "tokenizer")
    (path,) = (folder / "text_encoder").glob("*.safetensors")
    weights = load_file(path)
    scale = {name: 0.02 if "embed_tokens" in name else 8.0 for name in weights if "language_model" in name}
    save_file({name: tensor * scale.get(name, 1) for name, tensor in weights.items()}, path)
    return folder


def options(folder: Path, *more: str) -> list[str]:
    length = f"max_sequence_length={TEXT_TOKENS}"
    return ["--model", str(folder), "--text-encoder-dtype", "float32", "--set", length, *more]


def by_transformers(folder: Path, idea: str) -> str:
    """What transformers generates of the likeliest tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    config = json.loads((folder / "text_encoder" / "config.json").read_text())["text_config"]
    (path,) = (folder / "text_encoder").glob("*.safetensors")
    prefix = "language_model."
    weights = {name[name.index(prefix) + len(prefix) :]: x for name, x in load_file(path).items() if prefix in name}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**config)).eval()
    weights = {name if name.startswith("model.") else f"model.{name}": x for name, x in weights.items()}
    missing, surplus = model.load_state_dict(weights, strict=False)
    assert (missing, surplus) == (["lm_head.weight"], [])  # which are the embeddings
    text = f"<bos><start_of_turn>user\n{read_instructions(None)}\n\nIdea: {idea}<end_of_turn>\n<start_of_turn>model\n"
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    stops = tokenizer.convert_tokens_to_ids(["<eos>", TURNS[1]])
    with torch.no_grad():
        whole = model.generate(ids, do_sample=False, max_new_tokens=MOST_TOKENS, eos_token_id=stops, pad_token_id=0)
    return clean_answer(tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("more", ["", "--sharding trillium", "--offload layers"])
def test_the_text_is_that_of_transformers(writer, monkeypatch, capsys, more):
    """On one device and on eight, and with layers that come from the host's memory."""
    assert run_program(monkeypatch, "enhance", IDEAS[0], *options(writer), *more.split()) == 0
    assert capsys.readouterr().out == by_transformers(writer, IDEAS[0]) + "\n"


def test_the_text_encoder_alone_is_downloaded(writer, monkeypatch, capsys, tmp_path):
    cache, model = tmp_path / "hub", "someone/writer"
    files = {path.relative_to(writer).as_posix(): path.read_bytes() for path in writer.rglob("*.*") if path.is_file()}
    refining = ["recipe=two_stage", "second_stage.lora=[gone.safetensors]", "compute=full"]
    more = [part for setting in refining for part in ("--set", setting)]
    with local_hub(cache, monkeypatch, {model: files}):
        assert run_program(monkeypatch, "enhance", IDEAS[0], *options(model), *more) == 0
    assert {path.parent.name for path in cache.rglob("*.safetensors")} == {"text_encoder"}
    assert capsys.readouterr().out == by_transformers(writer, IDEAS[0]) + "\n"


def test_matrices_of_eight_bits_write_too(writer, monkeypatch, capsys):
    texts = []
    for weights in ("int8", "int8", "bfloat16"):
        more = ["--weights", weights, "--text-encoder-dtype", "bfloat16"]
        assert run_program(monkeypatch, "enhance", IDEAS[0], *options(writer)[:2], *more) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_many_ideas_are_written_alike_again(writer, monkeypatch, capsys):
    texts = []
    for ideas, more in ((IDEAS, ["--json"]), (IDEAS[::5], [])):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(ideas)))
        assert run_program(monkeypatch, "enhance", "-", *options(writer, "--sharding", "single", *more)) == 0
        texts.append(capsys.readouterr().out)
    prompts = json.loads(texts[0])["prompts"]
    assert [each["prompt"] for each in prompts] == IDEAS
    assert all(0 < each["tokens"] <= MOST_TOKENS for each in prompts)
    lines = [each["enhanced"] for each in prompts]
    assert texts[1].splitlines() == lines[::5]
    assert len({*lines}) > len(IDEAS) / 2


def made(monkeypatch: pytest.MonkeyPatch, folder: Path, clip: Path, *more: str) -> dict[str, object]:
    """The record of a clip, whose latents are saved."""
    files = ["-o", str(clip), "--save-latents", str(clip.with_suffix(".safetensors"))]
    assert run_program(monkeypatch, "generate", *options(folder), *SMALL, *files, *more) == 0
    return yaml.safe_load(clip.with_suffix(".yaml").read_text())


def same_latents(one: Path, other: Path) -> bool:
    first, second = (load_file(path.with_suffix(".safetensors")) for path in (one, other))
    return all(torch.equal(first[name], second[name]) for name in first)


def test_a_clip_is_made_from_the_written_prompt_which_its_record_says(writer, monkeypatch, capsys, tmp_path):
    clip, plain = tmp_path / "clip.mp4", tmp_path / "plain.mp4"
    record = made(monkeypatch, writer, clip, IDEAS[0], "--enhance", "--json")
    assert record["prompt"] == by_transformers(writer, IDEAS[0])
    shown = capsys.readouterr()
    assert f"prompt: {record['prompt']}" in shown.err
    assert json.loads(shown.out)["stages"]["enhance prompt"] > 0
    assert record["provenance"]["enhanced_from"] == IDEAS[0]
    made(monkeypatch, writer, plain, str(record["prompt"]))
    assert same_latents(clip, plain)
    capsys.readouterr()
    assert run_program(monkeypatch, "info", str(clip)) == 0
    assert f"enhanced from {IDEAS[0]}" in [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert run_program(monkeypatch, "replay", "--verify", str(clip), "--debug") == 0
    assert "enhance" not in capsys.readouterr().err  # it is read in the record


def test_an_interrupted_clip_goes_on_with_the_written_prompt(writer, monkeypatch, tmp_path):
    whole, clip = tmp_path / "whole.mp4", tmp_path / "clip.mp4"
    record = made(monkeypatch, writer, whole, IDEAS[1], "--enhance")
    files = ["-o", str(clip), "--save-latents", str(clip.with_suffix(".safetensors")), "--save-run"]
    with signal_at((0, 0, 1)):
        assert run_program(monkeypatch, "generate", *options(writer), *SMALL, *files, IDEAS[1], "--enhance") == 130
    assert run_program(monkeypatch, "resume", str(clip.with_suffix(".run"))) == 0
    resumed = yaml.safe_load(clip.with_suffix(".yaml").read_text())
    assert (resumed["prompt"], resumed["provenance"]) == (record["prompt"], record["provenance"])
    assert same_latents(whole, clip)


def test_a_warm_up_compiles_what_writes_the_prompt(writer, monkeypatch, capsys, tmp_path):
    (file := tmp_path / "own.txt").write_text("Write. " * 50)  # of a length that no other test has
    arguments = [*options(writer), *SMALL, "--enhance", "--enhance-with", str(file), "-o", str(tmp_path / "a.mp4")]
    with cache_restored():
        jax.config.update("jax_enable_compilation_cache", True)
        cached = [*arguments, "--compile-cache", str(tmp_path / "cache")]
        assert run_program(monkeypatch, "generate", *cached, IDEAS[0], "--no-compile") == 1
        assert "not compiled yet" in capsys.readouterr().err
        assert run_program(monkeypatch, "generate", *cached, "--warmup") == 0
        assert run_program(monkeypatch, "generate", *cached, IDEAS[0], "--no-compile") == 0


def test_a_temperature_draws_by_the_seed(writer, monkeypatch, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        arguments = options(writer, "--enhance-temperature", "1.5", "--seed", seed)
        assert run_program(monkeypatch, "enhance", IDEAS[0], *arguments) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_instructions_of_a_file_take_the_place_of_the_own(writer, monkeypatch, capsys, tmp_path):
    (file := tmp_path / "short.txt").write_text("Say it at length.\n")
    assert run_program(monkeypatch, "enhance", IDEAS[0], *options(writer), "--enhance-with", str(file)) == 0
    text = capsys.readouterr().out.strip()
    model = LTX2.from_pretrained(str(writer), text_encoder_dtype="float32", max_sequence_length=TEXT_TOKENS)
    assert model.enhance(IDEAS[0], instructions="Say it at length.") == text
    assert model.enhance(IDEAS[0]) == by_transformers(writer, IDEAS[0]) != text


@pytest.mark.parametrize(
    ("answer", "prompt"),
    [
        (
            "  **A fox** \u201cruns\u201d \u2013 it\u2019s fast\u2026\n\nThen\u00a0it stops.",
            'A fox** "runs" - it\'s fast... Then it stops.',
        ),
        ('- "Stop!" she says', '"Stop!" she says'),
        ("Größe 東京\u200b ok\x07", "Größe 東京 ok"),
        ("\u2026 ** \n", ""),
    ],
)
def test_an_answer_becomes_one_plain_line(answer, prompt):
    assert clean_answer(answer) == prompt


def test_a_damaged_text_encoder_is_named(writer, monkeypatch, capsys, tmp_path):
    folder = copytree(writer, tmp_path / "model")
    (path,) = (folder / "text_encoder").glob("*.safetensors")
    weights = load_file(path)
    (norm,) = (name for name in weights if name.endswith("model.norm.weight"))
    save_file({**weights, norm: torch.full_like(weights[norm], torch.nan)}, path)
    assert run_program(monkeypatch, "enhance", "a", *options(folder)) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "the text_encoder in" in shown.err
    assert "is damaged: 1 not finite: norm.weight" in shown.err


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_program(monkeypatch, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["enhance", "a", "--enhance-temperature", "2.5"], "nearest: 2"),
        (["enhance", "a", "--enhance-temperature", "nan"], "--enhance-temperature nan is not from 0 to 2"),
        (["enhance", "a", "--seed", "3"], "--seed does nothing at temperature 0"),
        (["enhance", " "], "the prompt is empty"),
        (["enhance", "a", "fox"], "expected one prompt, got 2"),
        (["enhance", "a", "--enhance-with", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["generate", "a", "--enhance-with", "x.txt"], "--enhance-with does nothing without --enhance"),
        (["generate", "a", "--enhance-temperature", "1"], "--enhance-temperature does nothing without --enhance"),
        (["generate", "a", "--enhance", "--segment", "0.2: b"], "--enhance writes one prompt"),
    ],
)
def test_what_cannot_be_meant_is_refused(writer, monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(monkeypatch, capsys, *arguments, *options(writer))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b" \n", "no instructions"), (b"\xff\xfe", "no text in UTF-8"), (b"a\0b", "no instructions")],
)
def test_files_without_instructions_are_refused(writer, monkeypatch, capsys, tmp_path, content, message):
    (file := tmp_path / "instructions.txt").write_bytes(content)
    assert message in refused(monkeypatch, capsys, "enhance", "a", "--enhance-with", str(file), *options(writer))


def test_instructions_that_are_too_long_are_refused(writer, monkeypatch, capsys, tmp_path):
    (file := tmp_path / "long.txt").write_text("word " * 2000)
    assert "more than 8192" in refused(
        monkeypatch, capsys, "enhance", "a", "--enhance-with", str(file), *options(writer)
    )


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("tokenizer", {}, "its tokenizer has no <start_of_turn>"),
        ("text_encoder", {"tie_word_embeddings": False}, "has no language head"),
        ("text_encoder", {"text_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping"),
    ],
)
@pytest.mark.parametrize("command", ["enhance a", "generate a --enhance -o a.mp4"])
def test_text_encoders_that_write_nothing_are_refused(
    checkpoint: Checkpoint, writer, monkeypatch, capsys, tmp_path, part, change, message, command
):
    folder = tmp_path / "model"
    copytree(writer if change else checkpoint.folder, folder)
    if change:
        config = json.loads((path := folder / part / "config.json").read_text())
        inner = {**config["text_config"], **change.get("text_config", {})}
        path.write_text(json.dumps({**config, **change, "text_config": inner}))
    monkeypatch.chdir(tmp_path)
    assert message in refused(monkeypatch, capsys, *command.split(), *options(folder))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_text_encoder_of_another_version_is_refused_before_a_download(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    message = "the text encoder of this model, Gemma-4, is not trained to write prompts"
    assert message in refused(monkeypatch, capsys, "enhance", "a", "--model", "ltx2.5", "--weights", "int8")


def test_a_dry_run_says_what_it_does_not_know(writer, monkeypatch, capsys, tmp_path):
    arguments = ["a fox", "--enhance", "--dry-run", *options(writer), *SMALL, "-o", str(tmp_path / "a.mp4")]
    assert run_program(monkeypatch, "generate", *arguments) == 0
    assert "the prompt is known once it is written" in capsys.readouterr().err
