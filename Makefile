# Each of these works on a fresh machine; the virtual environment and the installation come first:
#   make train    trains the language model of benchmarks/ fully sharded; pass options as ARGS="--model transformer"
#   make test     runs the tests that see every mutation and hold README's promises, in minutes; ARGS="-k parity"
#   make test-rest runs the others, and the examples in docstrings; make test-all runs all, the slow ones, too
#   make test-pairs draws six pairs of features by the commit, and trains each beside one device; ARGS="--pairs 40" more
#   make test-flags  trains the rows of features with the defaults that JAX announces (remat, custom_vjp); two minutes
#   make check    ruff, mypy and pyright, in seconds
#   make docs     builds the site of the pages in docs/, without a warning, into docs/_build/html; make docs-serve shows it
#   make test-targets  compiles the large models for TPUs and holds bytes, counts and overlap to their targets; an hour
#   make test-models   trains models of other packages, sharded from outside, and compares them with one device; minutes
#   make test-gpu      on one NVIDIA GPU: parity, compiled text, step time, peak memory, options; minutes, or says none
#   make test-mutants  puts some 400 mistakes into the library, each of which a test must see, and 40 drawn ones; half an hour
#   make docs-screens  pictures of every page of the site, narrow and wide, light and dark, and what does not fit; minutes
#   make prepare-release VERSION=... URL=...  version and changelog, as a commit; make release then builds and tries it
#   make test-deletion  deletes each feature from a copy, and runs the tests of the rest; twenty minutes; ARGS="--only padding --every-test"
#   make test-faults   kills the training job some fifty times, fills its disk, damages its checkpoints; half an hour
# PYTHON chooses the interpreter, VENV the folder of the environment. A target installs the extras of setup.cfg that it
# needs, the first time that it runs; what other targets have installed stays. So `make docs test` also runs the tests of
# what the pages need, which are skipped in an environment without it: those that compile for GPUs. (setuptools warns of
# each editable installation; PYTHONWARNINGS keeps that off the first screen.)
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2
# Bytecode is kept even where the environment forbids it (many containers do): else each process of each test compiles
# the library's source anew, a second of processor time.
export PYTHONDONTWRITEBYTECODE =

.PHONY: train test test-rest test-all test-pairs test-flags check docs docs-serve docs-screens test-targets test-models test-gpu test-mutants test-deletion test-faults
.PHONY: prepare-release release clean

train: $(VENV)/has-train
	$(VENV)/bin/python -m benchmarks.train_lm $(ARGS)

# A file runs in one worker: tests of a file share what they compile.
test: $(VENV)/has-test
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow" --quick $(ARGS)

# What `make test` leaves out, but for the slow ones.
test-rest: $(VENV)/has-test
	$(VENV)/bin/python -m pytest -n $(WORKERS) -m "not slow" --rest $(ARGS)

test-all: $(VENV)/has-test
	$(VENV)/bin/python -m pytest -n $(WORKERS) $(ARGS)

# mypy and pyright read what the code imports.
check: $(VENV)/has-test,dev,docs
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

docs: $(VENV)/has-docs,forecast-gpu
	JAX_PLATFORMS=cpu $(VENV)/bin/python -m sphinx --quiet --jobs 2 --fail-on-warning --keep-going docs docs/_build/html

docs-serve: docs
	$(VENV)/bin/python -m http.server --bind 127.0.0.1 --directory docs/_build/html 8000

docs-screens: docs $(VENV)/has-screens
	$(VENV)/bin/python docs/screens.py $(ARGS)

test-pairs: $(VENV)/has-test
	$(VENV)/bin/python -m pytest -n $(WORKERS) -v -m slow tests/exactness/test_drawn_pairs.py $(ARGS)

# Options that JAX has added in 0.12; earlier releases ignore these variables. One cell is left out: with jax_custom_vjp3
# nn.scan refuses a block with context attention (a data dependency on the body).
test-flags: $(VENV)/has-test
	JAX_REMAT3=1 JAX_CUSTOM_VJP3=1 $(VENV)/bin/python -m pytest -n $(WORKERS) -m "not slow" tests/exactness $(ARGS) \
	  --ignore tests/exactness/test_set_meshes.py \
	  --deselect "tests/exactness/test_exactness.py::test_quick_cells_match_a_single_device[scan + context @ 2x4-vma]"

test-targets: $(VENV)/has-test,forecast-gpu
	JAX_PLATFORMS=cpu $(VENV)/bin/python -m pytest tests/targets $(ARGS)

test-models: $(VENV)/has-test,models
	$(VENV)/bin/python -m pytest tests/third_party $(ARGS)

test-gpu: $(VENV)/has-test
	$(VENV)/bin/python -m tests.gpu

test-mutants: $(VENV)/has-test
	$(VENV)/bin/python -m tests.mutants $(ARGS)

test-deletion: $(VENV)/has-test
	$(VENV)/bin/python -m tests.deletion $(ARGS)

test-faults: $(VENV)/has-test
	$(VENV)/bin/python -m pytest tests/faults $(ARGS)

prepare-release:
	python3 .ci/release.py prepare "$(VERSION)" --url "$(URL)"

release: $(VENV)/has-dev
	$(VENV)/bin/python .ci/release.py build $(ARGS)

$(VENV)/has-%: setup.cfg setup.py
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	PYTHONWARNINGS=ignore $(VENV)/bin/python -m pip install --quiet -e ".[$*]"
	touch $@

clean:
	rm -rf .venv .venv-* runs build dist *.egg-info
