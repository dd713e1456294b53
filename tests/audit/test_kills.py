from __future__ import annotations

from pathlib import Path

import pytest
from kills import compare


@pytest.mark.slow
def test_kills_anywhere_leave_no_trace(tmp_path: Path) -> None:
    """Two of the moments that ``python tests/audit/kills.py 20`` tries."""
    told = compare(tmp_path, 2, "serial")
    assert [equal for _, _, equal in told] == [True, True], told
