"""Requests that differ in prompt and seed alone, denoised in one batch: the rows of a forward are videos of several."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ltx2_cli.plan.resolve import Plan, plan_decoding
from ltx2_cli.request.spec import RunSpec, Streams

T = TypeVar("T")
OWN_KEYS = frozenset({"prompt", "seed", "output", "save_latents", "asked"})  # of each request of a batch


def batch_key(spec: RunSpec) -> str | None:
    """A key that is equal for requests that one batch can make; None for a request that is made alone."""
    if spec.num_videos > 1 or spec.segments or spec.initial_noise:
        return None
    return repr([value for key, value in vars(spec).items() if key not in OWN_KEYS])


def member_plan(batch: Plan, plan: Plan) -> Plan:
    """The plan of a request in a batch, from its own and that of as many videos as the `batch` has: the stages are the
    batch's, and its clip is decoded alone."""
    decoding, _ = plan_decoding(plan.spec, plan, batch.stages[-1], batch.sharding)
    return replace(plan, sharding=batch.sharding, stages=batch.stages, decoding=decoding, at_once=batch.batch_size)


def joint_plan(batch: Plan, members: Sequence[Plan]) -> Plan:
    """The plan that denoises members of a `batch` at once. The last one fills it up, so that all batches of a size run
    one program."""
    filled = fill(members, batch.batch_size)
    texts, seeds = zip(*((each.prompts[0], each.seeds[0]) for each in filled), strict=True)
    prompts = (*texts, *_negative(members))
    return replace(
        batch,
        prompts=prompts,
        texts=tuple((text,) for text in texts),
        prompts_at_once=len(prompts),
        seeds=seeds,
        decoding=members[0].decoding,  # decoders stay where they are
    )


def joint_contexts(
    members: Sequence[Plan], contexts: Sequence[Mapping[str, Streams[Any]]], size: int
) -> dict[str, Streams[np.ndarray]]:
    """The contexts of the prompts of a batch, from those of its members, by the name of their connectors."""
    negative = next((row for row, plan in enumerate(members) if _negative([plan])), None)

    def joined(name: str, stream: str) -> np.ndarray:
        rows = [np.asarray(getattr(own[name], stream)) for own in contexts]
        others = [] if negative is None else [rows[negative][-1:]]
        return np.concatenate([*(row[:1] for row in fill(rows, size)), *others])

    return {name: Streams(joined(name, "video"), joined(name, "audio")) for name in contexts[0]}


def fill(items: Sequence[T], size: int) -> list[T]:
    """The items, and the last one until there are `size`."""
    return [*items, *[items[-1]] * (size - len(items))]


def _negative(members: Sequence[Plan]) -> tuple[str, ...]:
    """The negative prompt where it is read and is another than a member's prompt."""
    return next((plan.prompts[-1:] for plan in members if len(plan.prompts) > 1), ())
