# Two commands do everything on a fresh machine with Python 3.11 or newer, git and make:
#   make demo   serve adapters of six methods in one batch and compare each with PEFT; KEEP=DIR keeps them there
#   make test   run the tests
VENV ?= .venv
PYTHON ?= python3
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs clean

help:
	@sed -n '2,3p' Makefile | cut -c3-
	@echo "  make lint   style, types and import contracts"
	@echo "  make docs   the tables of docs/methods.md, from the registry of methods (minutes)"

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	@echo "Setting up $(VENV): SGLang, PyTorch and the test tools (11 GB, one to ten minutes)"
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip uv
	$(RUN) -m uv pip install --python $(RUN) --compile-bytecode --editable '.[dev]'
	@touch $(READY)

demo: $(READY)
	PYTHONPATH=tests $(RUN) examples/demo.py $(if $(KEEP),--keep $(KEEP))

test: $(READY)
	$(RUN) -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright
	$(VENV)/bin/lint-imports

docs: $(READY)
	PYTHONPATH=tests $(RUN) docs/make_methods.py

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .ruff_cache .coverage*
