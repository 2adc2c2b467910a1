"""Correctness of a device: the demo's denoiser beside stored latents, attention beside its definition.

`python -m ltx2_cli.core.self_test` writes the latents, for a new demo model.
"""

import json
from collections.abc import Iterator
from itertools import product

import jax
import numpy as np

from ltx2_cli.core.components import Components
from ltx2_cli.core.encode import abstract_contexts
from ltx2_cli.core.programs import enable_compilation_cache
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import run_phases
from ltx2_cli.core.state import RunState, all_latents
from ltx2_cli.nn.attention_cases import attended, drawn, error, packed
from ltx2_cli.nn.kernels.dispatch import NATIVE, attend_with, choose_backend
from ltx2_cli.nn.kernels.operands import Operands
from ltx2_cli.parallel.jit import jitted
from ltx2_cli.plan.inputs import CONNECTORS
from ltx2_cli.plan.resolve import plan_offline
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.request.spec import AttentionBackend, DType, Streams
from ltx2_cli.weights.hub import DEMO_FOLDER

STORED_RESULTS = DEMO_FOLDER / "self_test.json"  # results of a CPU, rounded to six digits
TEST_REQUEST = {"prompt": "a", "model": "demo", "seed": 0, "sharding": "single"}
CLIP = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 2}
# Relative errors in the Euclidean norm. Compilers order sums differently: 5e-6 between two levels of optimisation.
TOLERANCE = 1e-3
# Of attention. Rounding makes 2e-7 and 3e-3 on a CPU; 127 filled keys that are attended to make 8e-2.
ATTENTION_TOLERANCE = {DType.float32: 1e-4, DType.bfloat16: 1e-2}
QUERIES, KEYS, HEADS, HEAD_SIZE = 130, 257, 2, 64  # whole blocks of no kernel


def denoiser_error(device: jax.Device) -> float:
    """The relative L2 error of two guided steps of the demo on a device in float32, of the stream that is further off.
    The text is drawn at random: no text encoder is loaded."""
    expected = json.loads(STORED_RESULTS.read_text(encoding="utf-8"))
    made = demo_latents(device)._asdict()
    return max(error(made[name].reshape(-1), np.array(expected[name])) for name in Streams._fields)


def demo_latents(device: jax.Device) -> Streams[np.ndarray]:
    """The tokens, float32 [1, tokens, channels], that the demo makes of a text of noise."""
    plan = plan_offline(read_spec({**TEST_REQUEST, **CLIP}), [device])
    enable_compilation_cache(plan.compile_cache)
    random = np.random.default_rng(0)
    contexts = jax.tree.map(lambda x: random.standard_normal(x.shape, np.float32), abstract_contexts(plan))
    *_, state = run_phases(plan, RunState(contexts={CONNECTORS: contexts}), Components(plan), Report())
    return all_latents(state)


def kernels(device: jax.Device) -> Iterator[tuple[AttentionBackend, DType]]:
    """The kernels of the device's platform, and XLA's, in each dtype."""
    return product(dict.fromkeys([*NATIVE.get(device.platform, ()), AttentionBackend.xla]), ATTENTION_TOLERANCE)


def kernel_error(kernel: AttentionBackend, dtype: DType, device: jax.Device) -> float:
    """The relative L2 error of a kernel on queries that it normalises, rotates and gates. Raises `UsageError` if it
    does not support the device or the dtype."""
    choose_backend(kernel, device, dtype, [HEAD_SIZE])
    case = drawn(QUERIES, KEYS, HEADS, HEAD_SIZE, dtype.value)
    with jax.default_device(device):
        return error(np.asarray(jitted(_attend, None, kernel=kernel, heads=HEADS)(case.operands)), attended(case))


def _attend(operands: Operands, kernel: AttentionBackend, heads: int) -> jax.Array:
    return attend_with(kernel, packed(kernel, operands), heads)


def main() -> None:
    """Store the latents of this machine's first device, which is to be a CPU."""
    made = demo_latents(jax.devices("cpu")[0])._asdict()
    rounded = {name: [float(f"{value:.6g}") for value in made[name].reshape(-1)] for name in Streams._fields}
    STORED_RESULTS.write_text(json.dumps(rounded) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
