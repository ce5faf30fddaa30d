# The README's own commands. `.venv` is made on first use and again when its pins change.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: long setup demo test integration soak check bench docs clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@echo "setting up .venv (a few minutes the first time) ..."
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Rondo needs Python 3.11 or newer")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

demo: $(READY)  ## train a small model by reinforcement learning while you watch
	@$(BIN)/rondo demo

test: $(READY)  ## all tests that need neither a GPU nor a heavy install
	$(BIN)/python -m pytest tests -m 'not heavy' -n 2 --dist loadfile

integration: $(READY)  ## the heavy ones: whole runs of many processes, and vLLM (installed in the cache folder once)
	-@$(BIN)/python scripts/vllm_environment.py
	-@$(BIN)/python scripts/browser.py
	-@$(BIN)/python -c 'import ray' 2>/dev/null || $(BIN)/pip install --quiet --quiet --disable-pip-version-check \
		--constraint constraints.txt 'ray>=2.50' || echo "NO RAY: the tests that need it are skipped"
	$(BIN)/python -m pytest tests -m 'heavy and not long' -n 2 --dist loadfile -rs --durations=12

check: $(READY)  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

long: $(READY)  ## further cases of the heavy ones
	$(BIN)/python -m pytest tests -m long -n 2 --dist loadfile

soak: $(READY)  ## a run that is hurt 200 times, beside a calm one; 10,000 malformed requests
	$(BIN)/python -m tests.soak.soak --faults 200
	$(BIN)/python -m tests.soak.malformed --requests 10000

bench: $(READY)  ## figures, side by side in one run
	$(BIN)/python bench/engine.py
	$(BIN)/python bench/overlap.py

docs: $(READY)  ## the book, into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf .venv runs site .pytest_cache .mypy_cache .ruff_cache .hypothesis
