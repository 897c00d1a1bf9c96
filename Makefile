# make train   install into .venv and run the main job
# make test    install what the tests need and run them
# make check   formatter, linter, type checker

PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/

.PHONY: train test check clean

train: $(VENV)/installed
	$(RUN)torchrun --standalone --nproc-per-node=1 nlgrpo/train.py $(ARGS)

test: $(VENV)/installed-test
	NLGRPO_BUILD_EXT=1 $(RUN)python -m pytest

check: $(VENV)/installed-check
	$(RUN)ruff format --check .
	$(RUN)ruff check .
	$(RUN)mypy

# The compiled CPU ops are built against the installed torch: torch comes first, and the build sees it (no isolation).
$(VENV)/installed: pyproject.toml setup.py constraints.txt $(wildcard csrc/*)
	$(PYTHON) -c 'import sys; sys.exit("nlgrpo needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(RUN)pip install --quiet -c constraints.txt setuptools torch
	$(RUN)pip install --quiet -c constraints.txt --no-build-isolation -e .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	NLGRPO_BUILD_EXT=1 $(RUN)pip install --quiet -c constraints.txt --no-build-isolation -e ".[test]"
	touch $@

$(VENV)/installed-check: $(VENV)/installed
	NLGRPO_BUILD_EXT=1 $(RUN)pip install --quiet -c constraints.txt --no-build-isolation -e ".[test,dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
