"""Where a fault is not possible its test is skipped, with the reason that scenarios get."""

from __future__ import annotations

import pytest

from flare_qualify.needs import NEEDS


@pytest.fixture
def needs():
    """``needs("root", "loop")`` skips where one of them is missing."""

    def check(*names: str) -> None:
        missing = [reason for name in names if (reason := NEEDS[name]())]
        if missing:
            pytest.skip("; ".join(missing))

    return check
