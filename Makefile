# Everything on a fresh machine: `make audit` and `make test` each make the environment they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= leakscope-audit
BENCH ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: audit check lint style types suite test wheel-check bench docs clean

audit: $(VENV)/.installed
	@# Exit code 1 means that the audit found a leak, which is what the default audit is there to show.
	@$(BIN)/leakscope audit --out $(OUT); code=$$?; [ $$code -le 1 ] || exit $$code

lint: style types

style: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

suite: $(VENV)/.installed-dev
	@# Three workers for two processors: tests that wait for processes of their own leave one idle. Bytecode is kept
	@# whatever the shell says: without it each worker and each process that a test starts compiles the files again.
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/pytest -q -n 3 --dist worksteal $(SELECT)

check: style
	@# For daily work, a few minutes: all but the tests that are marked slow. mypy runs beside them.
	@$(MAKE) --no-print-directory -j 2 types suite SELECT='-m "not slow"'

test: style
	@$(MAKE) --no-print-directory -j 2 types suite

wheel-check: $(VENV)/.installed-dev
	@# Wheel and sdist, the extras under the constraints, an empty environment, and the embedded audit in it.
	$(BIN)/python tools/check_wheel.py --resolve --full

bench: $(VENV)/.installed-dev
	@# Exit code 1 means that something has become slower than in the last release. BENCH=--write stores new figures.
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python benchmarks/release.py $(BENCH)

docs: $(VENV)/.installed-dev
	@# No warning is let through. Read it at site/index.html; its search needs a server: python -m http.server -d site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: the constraint names the build that was tested, and nothing may pull in another.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints.txt -e .[dev]
	@$(BIN)/python tools/sarif_schema.py || echo "no index: SARIF is checked without the schema of the standard"
	@touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
