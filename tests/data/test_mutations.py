"""Every reader against hundreds of small mutations of a good file: it reads, or it raises one ValueError."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hostile_cases import FILES, mutated, write_data
from leakscope.data import load_data

MUTATIONS = 100


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", list(FILES))
def test_mutations(tmp_path: Path, what: str) -> None:
    _, name, content = FILES[what]
    reader, path, options = write_data(tmp_path, what, content)
    load_data(reader, path, **options)
    chance = random.Random(what)
    complaints = []
    for _ in range(MUTATIONS):
        (tmp_path / name).write_bytes(mutated(content, chance))
        try:
            load_data(reader, path, **options)
        except ValueError as error:
            complaints.append(str(error))
    assert complaints
    assert all(str(tmp_path / name) in words or "not valid examples" in words for words in complaints)
