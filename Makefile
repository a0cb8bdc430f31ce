# Every target sets up what it needs. PYTHON picks the interpreter of .venv, ARGS go to the command.
PYTHON ?= python3
BIN := .venv/bin
NEWEST_BIN := .venv-newest/bin
# The first of these that runs and is at least 3.12, which the newest JAX and Flax need.
NEWEST_PYTHON ?= $(shell for python in python3.13 python3.14 python3.12 $$HOME/.pyenv/versions/3.1[2-9]*/bin/python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$python && break; done)

# What the library of kernels is built from: the environments are installed again where it changes.
NATIVE := setup.py $(wildcard flax_attn/native/source/*)

# What another JAX or Flax can break: whatever uses their interfaces. The arithmetic is proven by make against.
NEWEST_TESTS := $(addprefix tests/backends/test_, choose.py cudnn.py splash.py tokamax.py xla.py) \
	$(addprefix tests/modules/test_, cache.py linen_bridge.py state.py transforms.py) \
	$(addprefix tests/sharding/test_, generate.py models.py parameters.py pretrained.py) tests/models tests/training \
	$(filter-out tests/test_types.py,$(wildcard tests/test_*.py))  # types are checked once, by make test

# What is compiled once is kept: the same small programs come up in the proof and in many tests.
parity against faults distributed test test-newest: export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/build/compiled
parity against faults distributed test test-newest: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0
parity against faults distributed test test-newest: export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES ?= -1

.PHONY: help parity against faults distributed test bench tpu gpu plan lint format test-newest test-gpu docs clean

help:
	@echo 'make parity       prove that every variant equals its PyTorch twin'
	@echo 'make against      prove it again on the newest JAX and Flax, without torch, from what make parity exported'
	@echo 'make faults       plant known porting faults one by one; show which check detects each'
	@echo 'make distributed  train on 2 and on 4 processes; show that the losses are those of one (three minutes)'
	@echo 'make test         run all tests'
	@echo 'make bench        measure time and memory beside PyTorch, jax.nn, Flax and attnax (a quarter of an hour)'
	@echo 'make tpu          compile for TPU chips without one: memory and time to compile'
	@echo 'make gpu          compile the attention of models for an H200 without one: memory, refusals, collectives (ten minutes,'
	@echo '                  needs a C compiler; ARGS=--quick takes one)'
	@echo 'make plan         plan the training of Llama 3 8B on TPUs without one: the table of docs/planning.md (an hour); with'
	@echo '                  ARGS="--model ... --topology ... ..." one plan of your own, see flax-attn plan --help'
	@echo 'make lint         check format, lint, types and generated tables'
	@echo 'make format       format the code'
	@echo 'make docs         write the tables of the documentation that follow from the code'
	@echo 'make test-newest  run the JAX-only tests on the newest Python, JAX and Flax, without torch'
	@echo 'make test-gpu     build cuDNN kernels for an H200 without one, for all that the backend says it takes'
	@echo 'make clean        remove the environments and caches'

parity: .venv/installed
	$(BIN)/flax-attn parity --export build/export $(ARGS)

against: .venv-newest/installed
	$(NEWEST_BIN)/flax-attn parity --against build/export $(ARGS)

faults: .venv/installed
	$(BIN)/flax-attn faults

distributed: .venv/installed
	$(BIN)/python examples/compare_processes.py $(ARGS)

test: .venv/installed
	$(BIN)/pytest -n auto -ra $(ARGS)

bench: .venv/installed
	$(BIN)/flax-attn bench $(ARGS)
	$(BIN)/flax-attn bench --models $(ARGS)

tpu: .venv-tpu/installed
	.venv-tpu/bin/flax-attn bench --tpu $(ARGS)

gpu: .venv-gpu/installed
	.venv-gpu/bin/flax-attn bench --gpu $(ARGS)

# One process a line: what compiles for a pod takes gigabytes.
plan: .venv-tpu/installed
ifdef ARGS
	.venv-tpu/bin/flax-attn plan $(ARGS)
else
	@grep -v '^#' docs/plans.txt | while read -r line; do .venv-tpu/bin/flax-attn plan $$line --markdown; done \
		| awk 'NR < 3 || !/^\| (model|---) /'
endif

test-gpu: .venv-gpu/installed
	.venv-gpu/bin/pytest -ra tests/backends/test_cudnn_kernels.py tests/bench/test_aot.py $(ARGS)

lint: .venv/installed
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright
	$(BIN)/flax-attn docs --check

format: .venv/installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: .venv/installed
	$(BIN)/flax-attn docs

test-newest: .venv-newest/installed
	$(NEWEST_BIN)/pytest -n auto -ra $(NEWEST_TESTS) $(ARGS)

.venv/installed: pyproject.toml constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "flax-attn needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[torch,viz,report,bench,dev]'
	@touch $@

# Installed as a user would, not editable and without torch.
.venv-newest/installed: pyproject.toml constraints-newest.txt $(NATIVE) $(shell find flax_attn -name '*.py')
	@test -n '$(NEWEST_PYTHON)' || { echo 'no Python 3.12 or newer found: make test-newest NEWEST_PYTHON=/path/to/python'; exit 1; }
	$(NEWEST_PYTHON) -m venv --clear .venv-newest
	rm -rf build/lib*  # of which setuptools would install files that are no longer in the sources
	$(NEWEST_BIN)/pip install --quiet -c constraints-newest.txt '.[viz,tokamax,generate]' beartype hypothesis pytest pytest-xdist
	@touch $@

.venv-tpu/installed: pyproject.toml constraints.txt $(shell find flax_attn -name '*.py')
	$(PYTHON) -m venv --clear .venv-tpu
	rm -rf build/lib*
	.venv-tpu/bin/pip install --quiet -c constraints.txt '.[tpu]'
	@touch $@

# With CUDA's compilers, and the cuDNN that the description of the GPU names: 4 GB.
.venv-gpu/installed: pyproject.toml constraints-newest.txt
	@test -n '$(NEWEST_PYTHON)' || { echo 'no Python 3.12 or newer found: make gpu NEWEST_PYTHON=/path/to/python'; exit 1; }
	$(NEWEST_PYTHON) -m venv --clear .venv-gpu
	.venv-gpu/bin/pip install --quiet -c constraints-newest.txt -e '.[aot-gpu]' beartype hypothesis pytest
	@touch $@

clean:
	rm -rf .venv .venv-newest .venv-tpu .venv-gpu build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f flax_attn/native/*.so
