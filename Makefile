# Two commands do all set-up on a fresh machine: `make demo` and `make test` (Python 3.11 or newer, make).
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
PY := $(VENV)/bin/python
RUN ?= runs/smollm2_demo
PYTEST := $(PY) -m pytest -q

.PHONY: demo test test-all lint types fetch install install-all install-browser docs clean

demo: fetch  ## co-evolve the embedded model for two cycles
	$(PY) run.py --config=configs/smollm2_demo.py --workdir=$(RUN)

test: $(VENV)/.installed  ## the suite that fits a laptop: at most 12 minutes
	$(PYTEST) -m "not slow"

test-all: test install-all  ## everything, with what the first part skipped
	$(PYTEST) -m "slow or tpu_aot"

fetch: $(VENV)/.installed  ## the embedded model, into the user cache
	$(PY) -m coevo_jax.models.smollm2

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	$(VENV)/bin/shellcheck -x tpu/*.sh

types: $(VENV)/.installed
	$(VENV)/bin/mypy

install: $(VENV)/.installed

$(VENV)/.installed: setup.py
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found; set PYTHON=/path/to/python"; exit 2; }
	@echo "installing into $(VENV) with $(PYTHON) (a few minutes the first time)"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[test,eval]'
	@touch $@

install-all: $(VENV)/.installed-all

$(VENV)/.installed-all: setup.py $(VENV)/.installed
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[tpu]'
	@touch $@

docs: $(VENV)/.installed  ## the site, into build/site; a warning is an error
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	$(PY) -m mkdocs build

install-browser: $(VENV)/.installed  ## what the report's browser tests need: Chromium from Debian where root may install, and the extra
	command -v chromium >/dev/null || { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; }
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[browser]'

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
