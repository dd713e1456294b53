"""Makes the doubles importable, here and in worker processes, which inherit the search path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
