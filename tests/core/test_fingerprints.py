"""Fingerprints tell arrays apart to the bit, and about how far apart they are."""

import hashlib

import numpy as np
import pytest

from ltx2_cli.core.provenance import fingerprint, read_fingerprint


def test_the_hash_is_of_the_values_as_stored_in_a_file() -> None:
    numbers = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    assert fingerprint(numbers).sha256 == hashlib.sha256(numbers.tobytes()).hexdigest()
    turned = numbers.transpose(1, 0, 2)
    assert fingerprint(turned).sha256 == hashlib.sha256(np.ascontiguousarray(turned).tobytes()).hexdigest()


def test_sketches_are_linear() -> None:
    """So a sketch of a sum is the sum of the sketches, and one number's is its own size."""
    one = np.zeros(1000, np.float32)
    one[417] = -3
    sketch = fingerprint(one).sketch
    assert sorted(abs(sketch))[-2:] == [0, 3]
    draw = np.random.default_rng(0)
    first, second = (draw.integers(-9, 9, 1000).astype(np.float32) for _ in range(2))
    together = fingerprint(first).sketch + fingerprint(second).sketch
    np.testing.assert_array_equal(fingerprint(first + second).sketch, together)


@pytest.mark.parametrize("error", [1.0, 3e-2, 1e-5])
def test_the_error_is_estimated_without_the_array(error: float) -> None:
    """A standard deviation of 4 % of it: four times that is never reached in twelve draws."""
    draw = np.random.default_rng(1)
    for _ in range(12):
        array, noise = draw.standard_normal((2, 1, 8, 5, 16, 16)).astype(np.float32)
        other = array + np.float32(error) * noise
        exact = np.linalg.norm(other - array) / np.linalg.norm(array)
        assert fingerprint(array).error(fingerprint(other)) == pytest.approx(exact, rel=0.16)


def test_the_estimate_does_not_depend_on_the_place_of_the_difference() -> None:
    array = np.random.default_rng(2).standard_normal((8, 5, 16, 16)).astype(np.float32)
    for where in (np.s_[:, :, :, :1], np.s_[:1], np.s_[:, 2:3, 4:6, 4:6]):
        other = array.copy()
        other[where] = 0
        exact = np.linalg.norm(other - array) / np.linalg.norm(array)
        assert fingerprint(array).error(fingerprint(other)) == pytest.approx(exact, rel=0.2)


def test_fingerprints_round_trip_through_a_record() -> None:
    kept = fingerprint(np.random.default_rng(3).standard_normal(777))
    again = read_fingerprint(kept.values())
    assert (again.size, again.sha256) == (777, kept.sha256)
    np.testing.assert_array_equal(again.sketch, kept.sketch)
    assert again.error(kept) == 0


def test_a_recorded_fingerprint_may_lack_its_sketch() -> None:
    values = fingerprint(np.ones(3, np.float32)).values()
    read = read_fingerprint({key: value for key, value in values.items() if key != "sketch"})
    assert (read.sha256, len(read.sketch)) == (values["sha256"], 0)


@pytest.mark.parametrize("sketch", ["", "rain", "AAAA"])
def test_wrong_sketches_are_refused(sketch: str) -> None:
    with pytest.raises(ValueError, match=r"sketch|base64|padding|multiple|buffer"):
        read_fingerprint({"size": 1, "sha256": "0", "sketch": sketch})
