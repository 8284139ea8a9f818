"""Every row of compatibility/ under a real engine: REPLAY, refusal with the key's name, or a warning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests import nets
from tests.compatibility import ROWS, Row
from tests.ranks import RankError, RankPool
from tests.reference import RULE_NAMES
from tests.test_zero_more import furthest, moved, replayed
from tests.zero_cases import SECOND_SETTINGS, ZeroCase, group_names

pytestmark = pytest.mark.timeout(300)
TOLERANCE = 2e-6
MATRIX_VARIANTS = ("mars-shampoo", "mars-m")


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    pools = {size: RankPool(size) for size in (2, 3, 4)}  # a pool starts its processes when it is first used
    yield pools
    for pool in pools.values():
        pool.close()


def middle_stage(row: Row) -> list[ZeroCase]:
    """The row's cases under ZeRO-2 that it has under ZeRO-1 too, whose engine class is the same, and under ZeRO-3."""
    return [c for c in row.cases if c.stage == 2 and all(replace(c, stage=s) in row.cases for s in (1, 3))]


def other_precision(row: Row) -> list[ZeroCase]:
    """Of the row's cases in both precisions those in bf16 at stages 1 and 2, and those in fp32 at stage 3."""
    twins = [c for c in row.cases if all(replace(c, dtype=dtype) in row.cases for dtype in ("fp32", "bf16"))]
    return [c for c in twins if (c.dtype == "bf16") == (c.stage in (1, 2)) and c.stage]


def other_stage(row: Row, number: int) -> list[ZeroCase]:
    """Of what works at stages 1 or 2 and at 3 alike: in every second row one of them, in the others the other."""
    if row.answer == "refused":
        return []
    return [c for c in row.cases if c.stage and _at_another(c, row) and (c.stage == 3) == bool(number % 2)]


def _at_another(case: ZeroCase, row: Row) -> bool:
    return any(replace(case, stage=s) in row.cases for s in ((1, 2) if case.stage == 3 else (3,)))


def runs() -> Iterator[object]:
    """In the default tier the largest number of ranks, of what runs at several stages one of them, of what runs in
    both precisions one, and two cases in each row of matrix variants."""
    for size in (2, 3, 4):
        for position, row in enumerate(ROWS):
            left_out = middle_stage(row) + other_precision(row) + other_stage(row, position)
            if all(case in left_out for case in row.cases):
                left_out = middle_stage(row)
            for number, case in enumerate(row.cases if size in row.ranks else ()):
                again = number > 1 and case.params.get("mars_type") in MATRIX_VARIANTS
                marks = [pytest.mark.slow] if size < max(row.ranks) or again or case in left_out else []
                yield pytest.param(
                    row, case, size, id=f"{row.feature.replace('`', '')}-{case}-{size}ranks", marks=marks
                )


@pytest.mark.parametrize(("row", "case", "size"), runs())
def test_row(pools: dict[int, RankPool], row: Row, case: ZeroCase, size: int) -> None:
    if row.answer == "refused":
        with pytest.raises(RankError) as error:
            pools[size].run(row.function, case, row.active)
        ranks = re.split(r"(?m)^rank \d+:$", str(error.value))[1:]
        told = [text for text in ranks if re.search(row.message, text)]
        assert len(told) == size, f"every rank must say so:\n{error.value}"
        return
    results = pools[size].run(row.function, case, row.active)
    for result in results:
        assert result["active"], "the feature was not active: this would prove nothing"
        assert result["rule_counts"] == counts(row, case)
        assert furthest(result["end"], results[0]["end"]) == 0.0
    warnings = [m for m in results[0]["messages"] if re.match(r"[\w.]+ (= |is not given: )", m)]
    assert bool(warnings) == (row.answer == "warns"), warnings
    assert not row.message or any(re.search(row.message, m) for m in warnings), warnings
    groups = None
    if case.construct == "groups":
        first, second = group_names(nets.build(case.net))
        groups = [{"names": first}, {"names": second, **SECOND_SETTINGS}]
    expected = row.replay(results[0], case) if row.replay else replayed(results[0], case, groups=groups)
    matrix = case.params.get("mars_type") in MATRIX_VARIANTS
    assert furthest(expected, results[0]["end"]) < (5e-6 if matrix else TOLERANCE)
    moved(results[0])


def counts(row: Row, case: ZeroCase) -> dict[str, int]:
    """The row's, with the name of the case's matrix variant for MARS-AdamW's."""
    variant = case.params.get("mars_type")
    return {RULE_NAMES[variant] if variant in MATRIX_VARIANTS and k != "AdamW" else k: n for k, n in row.counts.items()}
