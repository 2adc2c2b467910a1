"""LoRA files: which keys are a pair, what is refused and in which words, and the arrays against float64."""

import json
from pathlib import Path

import numpy as np
import pytest

from loras import factors, write, write_header
from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.lora import LoraDelta, open_lora

A, B = (4, 8), (6, 4)  # of rank 4, for a weight of 6x8
EXACT = 2e-7  # float32 rounds at 6e-8, twice here


def delta(path: Path, target: str, strength: float = 1.0) -> LoraDelta:
    return LoraDelta(((open_lora(path), target, strength),))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("lora_A.weight", "lora_B.weight"),
        ("lora_A.default.weight", "lora_B.default.weight"),
        ("lora_down.weight", "lora_up.weight"),
        ("lora.down.weight", "lora.up.weight"),
    ],
)
@pytest.mark.parametrize("alpha", [False, True])
def test_every_naming_of_a_pair_is_read(tmp_path: Path, a: str, b: str, alpha: bool) -> None:
    target = "transformer_blocks.0.attn1.to_out.0"
    keys = {f"{target}.{a}": A, f"{target}.{b}": B} | ({f"{target}.alpha": ()} if alpha else {})
    lora = open_lora(write_header(tmp_path / "x.safetensors", keys))
    assert list(lora.pairs) == [target]
    pair = lora.pairs[target]
    assert (pair.a, pair.b, pair.shape, pair.rank) == (f"{target}.{a}", f"{target}.{b}", (6, 8), 4)
    assert pair.alpha == (f"{target}.alpha" if alpha else None)


def test_opening_reads_the_header_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*arguments: object) -> np.ndarray:
        raise AssertionError("data was read")

    path = write_header(tmp_path / "x.safetensors", {"x.lora_A.weight": A, "x.lora_B.weight": B, "x.alpha": ()})
    monkeypatch.setattr(TensorFiles, "read_into", read)
    low_rank = LoraDelta(delta(path, "x").parts * 2)
    assert low_rank.rank == 8
    with pytest.raises(AssertionError, match="data was read"):
        low_rank.read()


def test_the_sum_of_files_equals_float64(tmp_path: Path) -> None:
    """Ranks, types, alphas and strengths all differ."""
    cases = [
        (4, "float32", 1.0, None),
        (7, "bfloat16", -0.35, 3.0),
        (1, "float16", 2.5, 16.0),
        (3, "float64", 0.1, 0.7),
    ]
    parts, wanted = [], np.zeros((6, 8))
    for number, (rank, dtype, strength, alpha) in enumerate(cases):
        tensors = factors("x", 6, 8, rank, number, dtype)
        stored = {} if alpha is None else {"x.alpha": np.array(alpha, np.float32)}
        parts += delta(write(tmp_path / f"{number}.safetensors", {**tensors, **stored}), "x", strength).parts
        a, b = (tensor.astype(np.float64) for tensor in tensors.values())
        wanted += strength * (1.0 if alpha is None else alpha / rank) * b @ a
    summed = LoraDelta(tuple(parts))
    a, b, scales = summed.read()
    assert {summed.dtype, a.dtype, b.dtype, scales.dtype} == {np.dtype(np.float32)}
    assert (a.shape, b.shape, scales.shape) == ((15, 8), (6, 15), (15,))
    got = b.astype(np.float64) * scales @ a.astype(np.float64)
    assert np.linalg.norm(got - wanted) / np.linalg.norm(wanted) < EXACT


@pytest.mark.parametrize("shape", [(), (1,)])
def test_an_alpha_divides_by_the_rank_of_its_layer(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = {**factors("x", 6, 8, 4, 0), **factors("y", 6, 8, 2, 1)}
    alphas = {"x.alpha": np.full(shape, 2, np.float32), "y.alpha": np.full(shape, 2, np.float32)}
    path = write(tmp_path / "x.safetensors", {**tensors, **alphas})
    for target, factor in (("x", 0.5), ("y", 1.0)):
        a, b, scales = delta(path, target).read()
        np.testing.assert_array_equal(a, tensors[f"{target}.lora_A.weight"])
        np.testing.assert_array_equal(b, tensors[f"{target}.lora_B.weight"])
        np.testing.assert_array_equal(scales, np.full(len(a), factor, np.float32))


@pytest.mark.parametrize(
    ("target", "config"),
    [
        ("transformer.x", {"transformer.lora_alpha": 8, "transformer.r": 4, "connectors.lora_alpha": 1}),
        ("connectors.x", {"transformer.lora_alpha": 1, "connectors.lora_alpha": 8, "transformer.use_dora": False}),
        ("x", {"lora_alpha": 8, "alpha_pattern": {}}),
    ],
)
def test_diffusers_alpha_is_in_the_metadata(tmp_path: Path, target: str, config: dict[str, object]) -> None:
    tensors = factors(target, 6, 8, 4, 0)
    path = write(tmp_path / "x.safetensors", tensors, {"lora_adapter_metadata": json.dumps(config)})
    assert delta(path, target, 0.5).read().scales.tolist() == [1] * 4  # 0.5 · 8 / 4


def test_pefts_alpha_is_in_the_config_beside_its_file(tmp_path: Path) -> None:
    tensors = factors("base_model.model.x", 6, 8, 4, 0)
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8, "peft_type": "LORA"}')
    for name, factor in (("adapter_model.safetensors", 2), ("another.safetensors", 1)):
        assert delta(write(tmp_path / name, tensors), "base_model.model.x").read().scales.tolist() == [factor] * 4


def test_an_alpha_in_the_file_overrides_a_config(tmp_path: Path) -> None:
    tensors = {**factors("x", 6, 8, 4, 0), "x.alpha": np.array(4, np.float32)}
    path = write(tmp_path / "x.safetensors", tensors, {"lora_adapter_metadata": '{"lora_alpha": 8}'})
    assert delta(path, "x").read().scales.tolist() == [1] * 4


PAIR = {"x.lora_A.weight": A, "x.lora_B.weight": B}
REFUSED = [
    ({**PAIR, "y.lora_A.weight": A}, "1 without one A and one B: y"),
    ({**PAIR, "y.lora_up.weight": B}, "1 without one A and one B: y"),
    ({**PAIR, "x.lora_A.other.weight": A}, "1 without one A and one B: x"),
    ({"x.lora_A.weight": A, "x.lora_B.weight": (6, 5)}, "1 whose A and B have no rank in common: x"),
    ({"x.lora_A.weight": (0, 8), "x.lora_B.weight": (6, 0)}, "1 whose A and B have no rank in common: x"),
    ({"x.lora_A.weight": (4, 8, 1, 1), "x.lora_B.weight": B}, "1 whose A or B is no matrix: x"),
    ({"x.lora_A.weight": A, "x.lora_B.weight": (6,)}, "1 whose A or B is no matrix: x"),
    ({**PAIR, "x.alpha": (2,)}, "1 whose alpha is not one number: x"),
    ({**PAIR, "y.alpha": ()}, "1 of an alpha without A and B: y.alpha"),
    ({**PAIR, "x.dora_scale": (6, 1)}, "1 of DoRA: x.dora_scale"),
    ({**PAIR, "x.lora_magnitude_vector": (6,)}, "1 of DoRA: x.lora_magnitude_vector"),
    ({**PAIR, "x.lora_magnitude_vector.default.weight": (6,)}, "1 of DoRA: x.lora_mag"),
    ({**PAIR, "x.diff": (6, 8), "x.diff_b": (6,)}, "2 of a whole difference: x.diff, x.diff_b"),
    ({**PAIR, "x.lora_B.bias": (6,)}, "1 of a bias: x.lora_B.bias"),
    ({**PAIR, "y.lora_embedding_A": A, "y.lora_embedding_B": B}, "2 of an embedding: y.lora_embedding_A"),
    ({**PAIR, "y.hada_w1_a": A, "y.lokr_w1": B}, "2 of LoHa or LoKr: y.hada_w1_a, y.lokr_w1"),
    ({**PAIR, "proj_in.weight": (6, 8)}, "1 of no known kind: proj_in.weight"),
    ({"proj_in.weight": (6, 8), "proj_in.bias": (6,)}, "holds no LoRA: none of its 2 keys is a low-rank factor"),
]


@pytest.mark.parametrize(("keys", "finding"), REFUSED, ids=[finding[:40] for _, finding in REFUSED])
def test_unsupported_adapters_are_refused_by_name(
    tmp_path: Path, keys: dict[str, tuple[int, ...]], finding: str
) -> None:
    with pytest.raises(UsageError) as caught:
        open_lora(write_header(tmp_path / "x.safetensors", keys))
    assert finding in str(caught.value)
    assert "x.safetensors" in str(caught.value)
    assert "another LoRA" in caught.value.hint


@pytest.mark.parametrize("dtype", ["I64", "F8_E4M3"])
def test_unsupported_dtypes_are_named(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(UsageError, match=f"1 of type {dtype}, which is not read: x"):
        open_lora(write_header(tmp_path / "x.safetensors", PAIR, dtype=dtype))


def test_all_faults_are_one_message_with_five_names(tmp_path: Path) -> None:
    halves = {f"y{number}.lora_A.weight": A for number in range(7)}
    with pytest.raises(UsageError) as caught:
        open_lora(
            write_header(tmp_path / "x.safetensors", {**PAIR, **halves, "x.dora_scale": (6,), "x.lora.bias": (6,)})
        )
    said = str(caught.value)
    assert "7 without one A and one B: y0, y1, y2, y3, y4 and 2 more" in said
    assert "x.dora_scale" in said
    assert "x.lora.bias" in said


@pytest.mark.parametrize(
    ("config", "finding"),
    [
        ('{"transformer.use_dora": true}', "the option transformer.use_dora: True"),
        ('{"use_rslora": true, "lora_bias": true}', "the option use_rslora: True; the option lora_bias: True"),
        ('{"alpha_pattern": {"to_q": 3}}', "the option alpha_pattern"),
        ('{"transformer.init_lora_weights": "pissa_niter_4"}', "the option transformer.init_lora_weights: pissa_niter"),
        ('{"lora_alpha": "much"}', "the option lora_alpha: much"),
        ('{"lora_alpha": NaN}', "the option lora_alpha: nan"),
        ("[1]", "is not a JSON object"),
        ("{", "is not a JSON object"),
    ],
)
def test_a_config_with_more_than_an_alpha_is_refused(tmp_path: Path, config: str, finding: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_lora(write_header(tmp_path / "x.safetensors", PAIR, {"lora_adapter_metadata": config}))
    assert finding in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_factors_are_read_in_their_type(tmp_path: Path, dtype: str) -> None:
    tensors = factors("x", 6, 8, 4, 0, dtype)
    read = delta(write(tmp_path / "x.safetensors", tensors), "x")
    wanted = np.dtype(np.float32 if dtype == "float64" else dtype)
    assert {read.dtype, read.read().a.dtype, read.read().b.dtype} == {wanted}
    np.testing.assert_array_equal(read.read().b, tensors["x.lora_B.weight"].astype(wanted))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("key", "value"),
    [("x.lora_A.weight", np.nan), ("x.lora_A.weight", -np.inf), ("x.lora_B.weight", np.inf), ("x.alpha", np.nan)],
)
def test_values_that_are_not_finite_are_a_run_error(tmp_path: Path, key: str, value: float, dtype: str) -> None:
    tensors = {**factors("x", 6, 8, 4, 0, dtype), "x.alpha": np.array(4, np.float32)}
    tensors[key].flat[0] = value
    with pytest.raises(RunError, match=r"x\.lora_A\.weight and its twin are not finite"):
        delta(write(tmp_path / "x.safetensors", tensors), "x").read()


def test_truncated_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", factors("x", 6, 8, 4, 0))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UsageError, match="damaged or cut short"):
        open_lora(path)
    (tmp_path / "x.ckpt").write_bytes(b"")
    with pytest.raises(UsageError, match=r"is not a \.safetensors file"):
        open_lora(tmp_path / "x.ckpt")
