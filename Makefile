# Three commands do everything on a fresh machine, virtual environment and installation included:
#   make train    trains the language model of benchmarks/ fully sharded; pass options as ARGS="--model transformer"
#   make test     runs the suite; pass options as ARGS="-k parity"
#   make test-targets  compiles the large models for TPUs and holds bytes, counts and overlap to their targets; an hour
#   make test-faults   kills the training job some fifty times, fills its disk, damages its checkpoints; half an hour
# PYTHON chooses the interpreter, VENV the folder of the environment.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2

.PHONY: train test test-targets test-faults clean

train: $(VENV)/installed
	$(VENV)/bin/python -m benchmarks.train_lm $(ARGS)

test: $(VENV)/installed
	$(VENV)/bin/python -m pytest -n $(WORKERS) $(ARGS)

test-targets: $(VENV)/installed
	JAX_PLATFORMS=cpu $(VENV)/bin/python -m pytest tests/targets $(ARGS)

test-faults: $(VENV)/installed
	$(VENV)/bin/python -m pytest tests/faults $(ARGS)

$(VENV)/installed: setup.cfg setup.py
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet -e .[train,test]
	touch $@

clean:
	rm -rf .venv .venv-* runs *.egg-info
