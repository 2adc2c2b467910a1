"""The number of jobs in a batch, by the estimate for TPUs that are not here."""

import pytest

from devices import tpus
from ltx2_cli.estimate.alternatives import Request
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.runs.batch_size import choose_batch_size


@pytest.mark.parametrize(
    ("keys", "jobs", "size", "low", "high"),
    [
        ({"recipe": "distilled", "num_frames": 49, "height": 320, "width": 512}, 8, 8, 0.1, 0.4),
        ({"recipe": "distilled"}, 3, 2, 0.7, 0.9),
        ({"recipe": "distilled"}, 1, 1, 1, 1),
        ({"height": 1088, "width": 1920}, 8, 1, 1, 1),  # which gain less than a tenth
    ],
    ids=["small", "three jobs", "one job", "large"],
)
def test_small_forwards_are_of_many_jobs(
    keys: dict[str, object], jobs: int, size: int, low: float, high: float
) -> None:
    request = Request(read_spec(keys, prompt="rain", model="ltx2.3"), tpus("TPU v6 lite", 8))
    chosen, fraction = choose_batch_size(request, jobs)
    assert chosen == size
    assert fraction is not None
    assert low <= fraction <= high
