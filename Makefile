# setup: the environment. repro: the pipeline. test: fast and smoke tests. bench: against peers.
# PROFILE=smoke|gpu runs the same graph with params/<profile>.yaml in a workspace of its own.
# tools: Prometheus with promtool, where apt-get can. monitor: Prometheus on the server at URL.
# TORCH_INDEX: a package index to take torch from, for instance one with CUDA or CPU builds only.

PYTHON ?= python3.11
VENV ?= .venv
PROFILE ?=
TORCH_INDEX ?=
URL ?= http://127.0.0.1:8000
TORCH_VERSION := 2.13.0
FREE_GIB := 10

BIN := $(abspath $(VENV))/bin
LOCK := requirements/lock.txt
STAMP := $(VENV)/.stamp-$(shell cat $(LOCK) pyproject.toml Makefile | sha256sum | cut -c1-16)
export PATH := $(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup ray repro test bench lint lock clean

setup: $(STAMP)

$(STAMP):
	@command -v $(PYTHON) >/dev/null || { \
	  echo "inferlab: $(PYTHON) not found; install Python 3.11 or name it: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v[:2] == (3, 11) or \
	  sys.exit(f"inferlab: needs Python 3.11, {sys.executable} is {v[0]}.{v[1]}; name another: make setup PYTHON=python3.11")'
	@$(PYTHON) -c 'import shutil, sys; free = shutil.disk_usage(".").free >> 30; free >= $(FREE_GIB) or \
	  sys.exit(f"inferlab: the environment and the cache need $(FREE_GIB) GiB of disk, {free} GiB are free")'
	rm -f $(VENV)/.stamp-*
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),PIP_INDEX_URL=$(TORCH_INDEX)) $(BIN)/python -m pip install -qq torch==$(TORCH_VERSION)
	$(BIN)/python -m pip install -qq --no-deps --require-hashes -r $(LOCK)
	$(BIN)/python -m pip install -qq --no-deps --no-build-isolation --editable .
	@$(BIN)/python -c 'import torch, transformers' || { \
	  echo "inferlab: torch does not import; remove $(VENV) and choose another build: make setup TORCH_INDEX=<url>" >&2; exit 1; }
	touch $@

# Optional: spreads the simulators' sweeps over a cluster (workers.backend: ray). 79 MB, and nothing
# else: what it needs is in the lock.
ray: setup
	$(BIN)/python -m pip install -qq --no-deps --require-hashes -r requirements/ray.txt

repro: setup
ifeq ($(PROFILE),)
	dvc repro
	@inferlab variants
	@echo "what to serve, and every study: reports/index.html (opens without a network)"
	@echo "more: dvc metrics show, dvc plots show"
else
	python -m inferlab.profile $(PROFILE)
endif

test: setup
	python -m pytest

bench: setup
	python -m benchmarks.load_generator
	python -m benchmarks.gptq
	python -m benchmarks.scoring
	python -m benchmarks.decode
	python -m benchmarks.packed_checkpoint
	python -m benchmarks.simulator

lint: setup
	ruff check .
	ruff format --check .

# Resolve the direct requirements anew and pin what they bring, with hashes. torch is left out,
# and torchvision, torchaudio and torchcodec with it: their wheels do not load beside its CPU build.
lock: setup
	python requirements/lock.py $(TORCH_VERSION) > $(LOCK).new
	mv $(LOCK).new $(LOCK)

# Optional: without it alert rules are written and evaluated, but not checked by promtool.
tools:
	@if command -v promtool >/dev/null; then promtool --version 2>&1 | head -1; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  { apt-get update && apt-get install -y --no-install-recommends prometheus; } >/dev/null 2>&1 \
	    && promtool --version 2>&1 | head -1 \
	    || echo "inferlab: apt-get could not install prometheus; alert rules go unchecked by promtool"; \
	else echo "inferlab: promtool needs apt-get and root (found neither or one); install Prometheus by hand to have alert rules checked"; fi

monitor: setup
	@inferlab monitor --url $(URL)

clean:
	rm -rf $(VENV) .profiles
