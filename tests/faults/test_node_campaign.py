"""The judge of the campaign over machines: what it calls wrong, by hand."""

import pytest

from tests.faults.node_campaign import judged

LEARNER = "learner"


def test_turns_of_two_learners_in_order_are_right() -> None:
    # The second one gets 2 again, since the first had not acknowledged it.
    counts = judged([LEARNER, "1 100", "2 150", LEARNER, "2 150", "3 200", "4 250"])
    assert counts == {"learners": 2, "turns": 4, "gaps": 0, "disorder": 0, "overlaps": 0}


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        (["1 100", "3 200"], {"gaps": 1, "disorder": 1}),
        (["1 100", "2 150", "2 150"], {"disorder": 1}),
        (["1 100", "2 150", LEARNER, "4 250"], {"gaps": 1}),
        (["1 100", "2 90"], {"overlaps": 1}),
        (["1 100", LEARNER, "1 120"], {"overlaps": 1}),
    ],
)
def test_what_is_wrong_with_turns(lines: list[str], wrong: dict[str, int]) -> None:
    counts = judged([LEARNER, *lines])
    assert {name: counts[name] for name in ("gaps", "disorder", "overlaps") if counts[name]} == wrong
