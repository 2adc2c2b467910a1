"""Prompts that the text encoder's language model writes from an idea and instructions."""

import json
from typing import Any, NamedTuple

import jax
import numpy as np

from ltx2_cli.core.advice import ENHANCE, memory_for
from ltx2_cli.core.components import Components, network_program
from ltx2_cli.core.encode import check_text
from ltx2_cli.core.programs import Program
from ltx2_cli.core.report import Report
from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.models.gemma import GEMMA_3, TIED_HEAD, Gemma, GemmaArch
from ltx2_cli.models.tokenizer import Chat
from ltx2_cli.parallel.arrays import to_devices, to_host
from ltx2_cli.parallel.jit import jitted
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.spelling import typed

MOST_TOKENS = 512  # of a prompt that is written
MOST_QUESTION = 8192  # tokens of instructions and idea
BUCKET = 256  # tokens: a question's length is rounded up to a multiple, so that few programs are compiled
REPLACEMENT = "\ufffd"  # for bytes that are no character
TYPOGRAPHY = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u2032", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u2033\u00ab\u00bb", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015", "-"),
        "\u2026": "...",
    }
)  # typography, by the characters that captions are written with


class Idea(NamedTuple):
    """An idea of a clip, and how a prompt is written from it."""

    text: str
    instructions: str
    temperature: float  # 0: the likeliest tokens; above, tokens drawn by the seed
    seed: int


class EnhancedPrompt(NamedTuple):
    """A prompt that was written."""

    text: str  # one line
    tokens: int
    whole: bool  # it came to an end before there were `MOST_TOKENS`


def check_writer(plan: Plan) -> None:
    """Raise `UsageError` for a text encoder that writes no prompts, before its weights are read."""
    arch, other = plan.arch.text_encoder, f"`ltx2 enhance` with {typed('model', 'ltx2.3')}, and its prompt here"
    if arch.generation != GEMMA_3:
        raise UsageError(f"the text encoder of this model, {arch.generation}, is not trained to write prompts", other)
    config = json.loads(arch.config)
    if not config.get(TIED_HEAD, True):
        raise UsageError(f"the text encoder has no language head: {TIED_HEAD} is false in {arch.where}", other)
    if config.get("final_logit_softcapping") not in (None, False):
        raise UsageError(f"final_logit_softcapping in {arch.where} is not implemented", other)


def open_chat(plan: Plan) -> Chat:
    """The chats of a plan's text encoder. Raises `UsageError` for one that writes no prompts."""
    check_writer(plan)
    return Chat.of(plan.checkpoint.tokenizer)


def enhance(plan: Plan, chat: Chat, idea: Idea, components: Components, report: Report) -> EnhancedPrompt:
    """The prompt of an idea. Raises `UsageError` for instructions and an idea that are too long together, `RunError`
    for an answer without words."""
    ids = chat.question(f"{idea.instructions}\n\nIdea: {idea.text}")
    if len(ids) > (most := min(MOST_QUESTION, plan.arch.text_encoder.max_position_embeddings - MOST_TOKENS)):
        raise UsageError(f"instructions and idea are {len(ids)} tokens, more than {most}", "shorter ones")
    program = enhance_program(plan, chat, len(ids))
    with (
        memory_for(ENHANCE, plan),
        components.compiling([program]),
        components.use("text_encoder", report) as encoder,
        report.activity("enhance prompt"),
    ):
        padded = np.zeros(_bucket(len(ids)), np.int32)
        padded[: len(ids)] = ids
        values = padded, np.int32(len(ids)), np.float32(idea.temperature), np.uint32(idea.seed)
        others = to_devices(values, plan.sharding.replicated)
        written = program(encoder, *others)
        check_text(written.finite, "text encoder", plan.text_encoder_dtype)
        count = int(to_host(written.number))
        answer = to_host(written.ids)[:count]
    whole = answer[-1] in chat.stops
    if not (text := clean_answer(chat.text(answer))):
        raise RunError("the text encoder wrote no words", "another prompt, or --enhance-temperature 0.7")
    return EnhancedPrompt(text, count, bool(whole))


def clean_answer(text: str) -> str:
    """An answer as a prompt: one line from its first letter on, in plain characters."""
    shown = (letter if letter.isprintable() and letter != REPLACEMENT else " " for letter in text.translate(TYPOGRAPHY))
    line = " ".join("".join(shown).split())
    return line[next((place for place, letter in enumerate(line) if letter.isalnum() or letter == '"'), len(line)) :]


def enhance_program(plan: Plan, chat: Chat, tokens: int) -> Program:
    """The program that answers questions of about as many tokens."""
    from ltx2_cli.models.gemma_torch import build_torch_module

    arch: GemmaArch = plan.arch.text_encoder
    build_torch_module(arch.config, arch.where)  # now, in this thread: another lowers the program
    where = plan.sharding.replicated
    function = jitted(_answer, where, plan.sharding, sizes=_bucket(tokens), stops=chat.stops)
    others = ((_bucket(tokens),), np.int32), ((), np.int32), ((), np.float32), ((), np.uint32)
    abstract = (jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape, dtype in others)
    return network_program(plan, "prompt", ["text_encoder"], function, *abstract)


def _bucket(tokens: int) -> int:
    return -(-tokens // BUCKET) * BUCKET


def _answer(
    encoder: Gemma,
    ids: jax.Array,
    length: jax.Array,
    temperature: jax.Array,
    seed: jax.Array,
    *,
    stops: tuple[int, ...],
) -> Any:
    from ltx2_cli.models.text_generation import generate

    return generate(encoder, ids, length, temperature, jax.random.key(seed), most=MOST_TOKENS, stops=stops)
