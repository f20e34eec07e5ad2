"""Long lists of cases, of which the default suite runs some."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], every: int = 3) -> list[Any]:
    """`cases`, with all but the first of each `every` marked slow; a tuple has several values.

    None is a `pytest.param`, whose own marks would be lost.
    """
    cases = [*cases]
    assert not any(hasattr(case, "marks") for case in cases)
    return [
        case if number % every == 0 else pytest.param(*_values(case), marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
