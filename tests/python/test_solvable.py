"""What replay adds over the closed form, where the answer is known exactly."""

import pytest

from solvable_cases import CASES, Case
from trefoil.reference import TrefoilError

BLIND = {  # what the closed form says less than, by the case's comment
    "a busy sender into two incasts",
    "leaf-spine, 4:1 oversubscribed",
    "a card at half its rate",
    "a card down",
    "a rank 250 us late",
    "HT: the last chunk is forwarded",
    "a copy that ends halfway",
    "a copy that begins halfway",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_simgrid_gives_the_exact_time(case: Case) -> None:
    try:
        us, _ = case.times("simgrid")
    except TrefoilError as error:
        if "no SimGrid" in str(error):
            pytest.skip(str(error))
        raise
    assert us == pytest.approx(case.exact_us, rel=1e-4)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_closed_form_is_blind_to_some(case: Case) -> None:
    _, closed = case.times("queues")
    if case.name in BLIND:
        assert closed < 0.96 * case.exact_us
    else:
        assert closed == pytest.approx(case.exact_us, rel=1e-9)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_queues_are_never_above_and_seldom_below(case: Case) -> None:
    """Queues do not throttle a sender, so only the doubly congested sender finishes too early."""
    us, closed = case.times("queues")
    assert us >= closed * (1 - 1e-9)
    if case.name == "a busy sender into two incasts":
        assert us == pytest.approx(closed, rel=0.01)
    else:
        assert us == pytest.approx(case.exact_us, rel=5e-3)
