"""Repetition detection."""

from support.suite.rows import each_row

from pagoda.common.sampling_params import RepetitionDetectionParams


@each_row(
    ("tokens", "params", "ends"),
    [
        ([1, 2, 1, 2, 1, 2], (2, 1, 3), True),
        ([1, 2, 1, 2, 1, 2], (2, 2, 3), True),
        ([1, 2, 1, 2, 1, 2], (1, 1, 3), False),
        ([1, 2, 1, 2, 1, 2], (2, 1, 4), False),
        ([9, 1, 2, 1, 2, 1, 2], (5, 0, 3), True),
        ([1, 2, 1, 2, 1], (2, 1, 3), False),
        ([2, 1, 2, 1, 2], (2, 1, 2), True),
        ([3, 2, 1, 2, 1, 1], (3, 2, 2), False),
        ([7, 7, 7], (4, 0, 3), True),
        ([7, 7, 7], (0, 0, 0), False),
        ([], (3, 1, 2), False),
    ],
)
def test_repetition(tokens: list[int], params: tuple[int, int, int], ends: bool) -> None:
    assert RepetitionDetectionParams(*params).ends(tokens) is ends
