# Every target sets up what it needs. PYTHON picks the interpreter of .venv, ARGS go to the command.
# It is not the newest that is there: constraints.txt is of Python 3.11, for which the pinned torch is a small CPU build, and
# which ends at a JAX that is known to be wrong (flax-attn show environment). What has the newest JAX has NEWEST_PYTHON.
# The system's Python goes first: what a version manager has built mostly lacks the compiler's profile, and takes 1.9 times as
# long in a loop.
PYTHON ?= $(shell /usr/bin/python3.11 -c 'import ensurepip, venv' 2>/dev/null && echo /usr/bin/python3.11 || echo python3)
BIN := .venv/bin
NEWEST_BIN := .venv-newest/bin
# The first of these that runs and is at least 3.12, which the newest JAX and Flax need.
NEWEST_PYTHON ?= $(shell for python in python3.13 python3.14 python3.12 $$HOME/.pyenv/versions/3.1[2-9]*/bin/python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$python && break; done)

# What the library of kernels is built from: the environments are installed again where it changes.
NATIVE := setup.py $(wildcard flax_attn/native/source/*)

# What another JAX or Flax can break: whatever uses their interfaces. The arithmetic is proven by make against. Left out are what
# reads or writes files alone, what takes longest to use what the others use (test_stack.py, test_turns.py, test_device_check.py,
# test_long_runs.py, and the models on meshes), and types, which are checked once, by make test.
NOT_NEWEST := $(addprefix %/test_, checkpoint_folders.py device_check.py edited_configs.py encoder_folders.py folders.py \
	imports.py interrupted_saves.py killed_writers.py long_runs.py stack.py turns.py types.py)
NEWEST_TESTS := $(addprefix tests/backends/test_, choose.py cudnn.py splash.py tokamax.py dense.py) \
	$(addprefix tests/modules/test_, cache.py linen_bridge.py state.py transforms.py) \
	$(addprefix tests/sharding/test_, generate.py parameters.py pretrained.py) \
	tests/backends/test_fused.py::test_functions_of_scores_with_the_gradients_of_what_they_capture \
	$(filter-out $(NOT_NEWEST),$(wildcard tests/models/test_*.py tests/training/test_*.py tests/test_*.py))

# What is compiled once is kept: the same small programs come up in the proof and in many tests.
parity against faults distributed field field-by-hand everywhere docs fuzz right test test-newest test-oldest: export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/build/compiled
parity against faults distributed field field-by-hand everywhere docs fuzz right test test-newest test-oldest: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0
parity against faults distributed field field-by-hand everywhere docs fuzz right test test-newest test-oldest: export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES ?= -1
# What is not compiled is a program for each operation, in which there is nothing to optimise.
parity against: export JAX_DISABLE_MOST_OPTIMIZATIONS ?= 1
# As in conftest.py: they compile sooner. The newest XLA does not know the first.
parity: export XLA_FLAGS ?= --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1

# What an old dependency can break: whatever calls one.
OLDEST_TESTS := tests/modules/test_cache.py tests/training tests/models tests/sharding/test_parameters.py tests/test_cli_generate.py

.PHONY: help parity against faults distributed test fuzz right bench field field-by-hand everywhere tpu gpu plan lint format tables docs docs-look docs-links dist test-newest test-oldest test-gpu test-tpu test-fused clean

help:
	@echo 'make parity       prove that every variant equals its PyTorch twin'
	@echo 'make against      prove it again on the newest JAX and Flax, without torch, from what make parity exported'
	@echo 'make faults       plant known porting faults one by one; show which check detects each'
	@echo 'make distributed  train on 2 and on 4 processes; show that the losses are those of one (three minutes)'
	@echo 'make test         run the tests, and a share of the longest grids; ARGS=--whole runs all of those, ARGS=FILE all of a file'
	@echo 'make fuzz         make random calls until 2,000 are done or 5 minutes are over; judge each by a formula in NumPy;'
	@echo '                  ARGS="--case 1234" prints and runs one of them again'
	@echo 'make right        compare right pairs of modules, at three sizes and five seeds: no alarm (hours); ARGS="--only NAME" runs one'
	@echo 'make bench        measure time and memory beside PyTorch, jax.nn, Flax and attnax (a quarter of an hour)'
	@echo 'make field        judge Flax ports of other libraries beside their PyTorch twins; docs/field.md (an hour)'
	@echo 'make field-by-hand  reach the verdicts of make field again without the harness (half an hour)'
	@echo 'make everywhere   run the attention tests of jax, Flax, Keras, Equinox and Haiku under flax_attn.everywhere (ten minutes);'
	@echo '                  ARGS="--checkout jax=FOLDER equinox=FOLDER" for those whose tests are not on PyPI'
	@echo 'make tpu          compile for TPU chips without one: memory and time to compile'
	@echo 'make gpu          compile the attention of models for an H200 without one: memory, refusals, collectives (ten minutes,'
	@echo '                  needs a C compiler; ARGS=--quick takes one; ARGS=--models prints what fused compiles to on each chip)'
	@echo 'make plan         plan the training of Llama 3 8B on TPUs without one: the table of docs/accelerators.md (an hour); with'
	@echo '                  ARGS="--model ... --topology ... ..." one plan of your own, see flax-attn plan --help'
	@echo 'make lint         check format, lint, types, generated tables and language'
	@echo 'make format       format the code'
	@echo 'make tables       write the tables of the documentation that follow from the code'
	@echo 'make docs         build the site into build/site: run its notebooks, check its links'
	@echo 'make docs-look    look at each of its pages in Chromium: pictures in build/looks, accessibility, overflow'
	@echo 'make docs-links   ask for every address outside it that the site links to'
	@echo 'make test-newest  run the JAX-only tests on the newest Python, JAX and Flax, without torch'
	@echo 'make test-oldest  run some of them on the oldest dependencies that pyproject.toml allows'
	@echo 'make dist         build the distributions, check them, and try the wheel on Python 3.11 to 3.13, without torch'
	@echo 'make test-fused   run the Pallas kernels on every case of the conformance suite in the interpreter, as on GPU and on TPU'
	@echo 'make test-gpu     build the kernels of cudnn and fused for an H200 without one, and count launches and temporaries'
	@echo 'make test-tpu     build the kernels of fused, and models of other libraries, for TPU chips without one'
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

fuzz: .venv/installed
	$(BIN)/python -m tests.fuzz $(ARGS)

right: .venv/installed
	$(BIN)/python -m parity_tests.right_pairs $(ARGS)

bench: .venv/installed
	$(BIN)/flax-attn bench $(ARGS)
	$(BIN)/flax-attn bench --models $(ARGS)
	$(BIN)/flax-attn bench --families $(ARGS)
	$(BIN)/python tools/startup.py

# ARGS='--only mistral' judges some, ARGS=--resume those that have no result yet.
field: .venv-field/installed
	.venv-field/bin/python -m field.judge $(ARGS)
	.venv-field/bin/python -m field.page

# A second time without the harness; then what is not equal, with every float32 in the libraries' source written as float64.
field-by-hand: .venv-field/installed
	.venv-field/bin/python -m field.by_hand $(ARGS)
	.venv-field/bin/python -m field.by_hand --widened $(ARGS)
	.venv-field/bin/python -m field.page

everywhere: .venv-everywhere/installed
	.venv-everywhere/bin/python -m tools.suites $(ARGS)
	KERAS_BACKEND=jax .venv-everywhere/bin/pytest -ra tests/everywhere

tpu: .venv-tpu/installed
	.venv-tpu/bin/python -m tools.aot tpu $(ARGS)

gpu: .venv-gpu/installed
	.venv-gpu/bin/python -m tools.aot gpu $(ARGS)

# One process a line: what compiles for a pod takes gigabytes.
plan: .venv-tpu/installed
ifdef ARGS
	.venv-tpu/bin/flax-attn plan $(ARGS)
else
	@grep -v '^#' docs/plans.txt | while read -r line; do .venv-tpu/bin/flax-attn plan $$line --markdown; done \
		| awk 'NR < 3 || !/^\| (model|---) /'
endif

# Every case of the conformance suite in Pallas's interpreter, in the form of a GPU and in that of a TPU.
test-fused: .venv/installed
	FLAX_ATTN_ALL_OF_FUSED=1 $(BIN)/pytest tests/backends/test_fused.py $(ARGS)

test-gpu: .venv-gpu/installed
	KERAS_BACKEND=jax .venv-gpu/bin/pytest -ra tests/backends/test_cudnn_kernels.py tests/backends/test_fused_compiled.py \
		tests/backends/test_blocked_compiled.py tests/everywhere/test_compiled.py tests/tools/test_aot.py $(ARGS)

# The environment holds a wheel; what is tested is the code here.
test-tpu: .venv-tpu/installed
	KERAS_BACKEND=jax PYTHONPATH=. .venv-tpu/bin/python -m pytest -ra tests/backends/test_fused_compiled.py tests/everywhere/test_compiled.py $(ARGS)

# Folders whose lines hold one idea each; the others are still to be written so. The pattern is git's, for files without folders.
READABLE := attn_spec tools $(addprefix torch_ref/, attention.py functional models modules) $(addprefix flax_attn/, aot backends bench cli convert device everywhere functional models modules native plan proof sharding training) flax_attn/parity/adapters flax_attn/parity/report ':(glob)flax_attn/parity/*.py' $(addprefix parity_tests/, backends bad_calls functional modules right_pairs models counterparts proof conftest.py test_attention.py test_fuzz.py test_tables.py)

lint: .venv/installed
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright
	$(BIN)/python tools/tables.py --check
	$(BIN)/python -m tools.platforms --check
	$(BIN)/python tools/language.py --check
	$(BIN)/python tools/density.py --check $(READABLE)

format: .venv/installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

tables: .venv/installed
	$(BIN)/python tools/tables.py
	$(BIN)/python -m tools.platforms

SITE := $(BIN)/sphinx-build -W --keep-going -n -E -j auto -d build/doctrees

docs: .venv/installed
	rm -rf build/site
	$(SITE) -q -b html docs build/site
	@echo 'open build/site/index.html'

# Needs Chromium, as `apt install chromium` has it.
docs-look: .venv/installed
	$(BIN)/python docs/look.py $(ARGS)

# The pages are read again without running their notebooks.
docs-links: .venv/installed
	$(BIN)/sphinx-build -q -b linkcheck -D nb_execution_mode=off -D suppress_warnings=myst-nb.lexer docs build/links

test-newest: .venv-newest/installed
	$(NEWEST_BIN)/pytest -n auto -ra --share $(NEWEST_TESTS) $(ARGS)

test-oldest: .venv-oldest/installed
	.venv-oldest/bin/pytest -n auto -ra $(OLDEST_TESTS) $(ARGS)

# uv finds each Python, and makes an environment that holds the wheel and what it needs.
dist: .venv-release/installed
	rm -rf build/lib* dist
	.venv-release/bin/python -m build --quiet --outdir dist
	.venv-release/bin/twine check --strict dist/*
	export PATH="$$PATH:$$(echo $$HOME/.pyenv/versions/*/bin | tr ' ' :)"; for python in 3.11 3.12 3.13; do \
		.venv-release/bin/uv run --quiet --isolated --no-project --python $$python --with dist/*.whl \
			examples/first_call.py || exit 1; done

.venv/installed: pyproject.toml constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "flax-attn needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[torch,viz,report,bench,dev,docs]'
	@touch $@

# Installed as a user would, not editable and without torch.
.venv-newest/installed: pyproject.toml constraints-newest.txt $(NATIVE) $(shell find attn_spec flax_attn -name '*.py')
	@test -n '$(NEWEST_PYTHON)' || { echo 'no Python 3.12 or newer found: make test-newest NEWEST_PYTHON=/path/to/python'; exit 1; }
	$(NEWEST_PYTHON) -m venv --clear .venv-newest
	rm -rf build/lib*  # of which setuptools would install files that are no longer in the sources
	$(NEWEST_BIN)/pip install --quiet -c constraints-newest.txt '.[viz,tokamax,generate]' beartype flatbuffers hypothesis pytest pytest-xdist zstandard
	@touch $@

.venv-oldest/installed: pyproject.toml $(NATIVE) $(shell find attn_spec flax_attn -name '*.py')
	$(PYTHON) -m venv --clear .venv-oldest
	rm -rf build/lib*
	.venv-oldest/bin/pip install --quiet uv
	.venv-oldest/bin/uv pip install --quiet --python .venv-oldest/bin/python --resolution lowest-direct \
		'.[generate]' 'beartype>=0.20' 'hypothesis>=6.100' 'pytest>=8' 'pytest-xdist>=3.6'
	@touch $@

.venv-release/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/pip install --quiet -c constraints.txt build twine uv
	@touch $@

.venv-tpu/installed: pyproject.toml constraints.txt $(shell find attn_spec flax_attn -name '*.py')
	$(PYTHON) -m venv --clear .venv-tpu
	rm -rf build/lib*
	.venv-tpu/bin/pip install --quiet -c constraints.txt '.[tpu]' beartype equinox hypothesis keras pytest
	@touch $@

# Of the last transformers that has Flax models, and what else is judged; without what the kernels need.
.venv-field/installed: pyproject.toml field/constraints.txt
	$(PYTHON) -m venv --clear .venv-field
	.venv-field/bin/pip install --quiet -r field/constraints.txt
	echo $(CURDIR) > $$(.venv-field/bin/python -c 'import site; print(site.getsitepackages()[0])')/flax_attn.pth
	@touch $@

# The targets of everywhere, and what their tests need.
.venv-everywhere/installed: pyproject.toml tools/suites/constraints.txt $(NATIVE)
	$(PYTHON) -m venv --clear .venv-everywhere
	.venv-everywhere/bin/pip install --quiet -c tools/suites/constraints.txt -e . keras equinox dm-haiku \
		beartype hypothesis pytest scipy
	@touch $@

# With CUDA's compilers, and the cuDNN that the description of the GPU names: 4 GB.
.venv-gpu/installed: pyproject.toml constraints-newest.txt
	@test -n '$(NEWEST_PYTHON)' || { echo 'no Python 3.12 or newer found: make gpu NEWEST_PYTHON=/path/to/python'; exit 1; }
	$(NEWEST_PYTHON) -m venv --clear .venv-gpu
	.venv-gpu/bin/pip install --quiet -c constraints-newest.txt -e '.[aot-gpu]' beartype equinox hypothesis keras pytest
	@touch $@

clean:
	rm -rf .venv .venv-newest .venv-oldest .venv-release .venv-tpu .venv-gpu .venv-field .venv-everywhere build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f flax_attn/native/*.so
