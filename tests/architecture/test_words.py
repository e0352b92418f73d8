"""Names say what they hold: few assigned names are words such as `made`, `found` and `each`."""

from __future__ import annotations

from scripts.count_words import count_words

MOST = 0.03  # of all assigned names


def test_assigned_names_name_the_thing() -> None:
    counts = count_words("purevk")
    share = counts.words.total() / counts.names
    assert share <= MOST, (
        f"{100 * share:.2f} %: {counts.words}; most are in {counts.files.most_common(9)}"
    )
