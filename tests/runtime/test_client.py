"""What the terminal client says of an answer's timings."""

import pytest

from duovolt.runtime.proxy.client import describe


@pytest.mark.parametrize(
    "speed, proposed, accepted, words",
    [
        (47.31, 30, 24, "first token after 1,234 ms, then 47.3 tok/s, 24 of 30 drafts accepted"),
        (None, 0, 0, "first token after 1,234 ms"),
    ],
)
def test_timings_in_words(speed: float | None, proposed: int, accepted: int, words: str) -> None:
    timings = {
        "prompt_ms": 1234.4,
        "tokens_per_second": speed,
        "drafts_proposed": proposed,
        "drafts_accepted": accepted,
    }
    assert describe(timings) == words
