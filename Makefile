# `make run` and `make test` each do all their own set-up; CONTRIBUTING.md has the same steps
# for machines without make. PYTHON=... chooses the interpreter, WORKERS=... the test processes.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
# One for each processor, if there are 2 GB of free memory for each, at most 8; on a Mac at most 4.
# Tests have one more: a tenth of their time they wait for a clock, a socket or another process.
workers = $(shell cat /proc/meminfo 2> /dev/null | awk \
  -v n="$$(($$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN) + $(1)))" \
  'BEGIN { m = 4 } /^MemAvailable:/ { m = int($$2 / 2e6) } \
  END { if (n > m) n = m; print (n > 8) ? 8 : (n < 1) ? 1 : n }')
TESTERS := $(or $(WORKERS),$(call workers,1))
WORKERS ?= $(call workers,0)

# With bytecode kept, a worker collects the tests in half the time, and what they start begins sooner.
unexport PYTHONDONTWRITEBYTECODE

# A stamp is written after a complete installation, so an interrupted one is done again. There
# are three, because running needs neither JupyterLab nor the development tools.
RUN_STAMP := $(VENV)/.installed-run
COURSE_STAMP := $(VENV)/.installed-course
DEV_STAMP := $(VENV)/.installed-dev

# The engines of `minillm bench --vs`, and other projects' clients.
PEERS ?= vllm openvino
PEERS_DIR ?= .peers

.DEFAULT_GOAL := help
.PHONY: help run chat lab gpu check test test-mutation test-slow test-full test-emulated test-browser test-clients test-external notebooks facts facts-without-c stale bundle slides peers clean
.NOTPARALLEL:

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

run: $(RUN_STAMP) ## set up, generate with the embedded model, show how fast it was
	@$(PY) -m minillm

chat: $(RUN_STAMP) ## set up, download a small chat model once (93 MB), and chat with it (ARGS="--help" for options)
	@$(PY) -m minillm chat smollm2 $(ARGS)

lab: $(COURSE_STAMP) ## set up, then open the course in JupyterLab (ARGS="--help" for options)
	@$(PY) notebooks/lab.py $(ARGS)

check: $(DEV_STAMP) ## set up, then lint and types only
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy -n $(WORKERS)

# Tests first, chapters last: a chapter that fails is read best at the end of the screen. A file
# of tests or a chapter stays with one process, because its cells stand on each other.
CHAPTERS = $(PY) -m pytest -p tests.quick_nbformat --nbval-lax --nbval-current-env --nbval-cell-timeout 300 \
  -n $(WORKERS) --dist loadfile notebooks
FORKED = JUPYTER_DEFAULT_PROVISIONER_NAME=minillm-fork

# Each worker begins with its share of the files, so that what a file's tests share is made once, and
# takes tests from another's end when its own are done. nbval is for the chapters; importing it takes
# a second of each process.
PYTEST = $(PY) -m pytest --dist worksteal -p no:nbval
TESTS = $(PYTEST) -n $(TESTERS)

# Whether kernels are interpreted is decided when Triton is imported: once for a process.
INTERPRETED = TRITON_INTERPRET=1 $(PYTEST) -n $(WORKERS) tests/kernels/interpreted

# CPU seconds double where programs compete, because waiting threads spin, so a quiet machine keeps
# the budget of tests/budget.py: make test BUDGET=--budget
BUDGET ?=
test: check ## set up, then lint, types, graders, all tests but the slow ones, and every chapter in a hurry
	WORKERS=$(WORKERS) $(PY) -m tests.first_run
	$(TESTS) -m "not slow and not mutation" $(BUDGET)
	$(INTERPRETED) -m "not slow and not mutation" $(BUDGET)
	$(FORKED) MINILLM_QUICK=1 $(CHAPTERS)

test-mutation: $(DEV_STAMP) ## test the tests: each must find the bugs that are planted for it
	$(TESTS) -m "mutation and not slow"
	$(INTERPRETED) -m "mutation and not slow"

PART ?= 1/1
test-slow: $(DEV_STAMP) ## the slow tests, all or some (PART=2/24)
	$(TESTS) -m slow --part $(PART)
	$(INTERPRETED) -m slow --part $(PART)

test-full: check ## everything: slow tests and planted bugs, too, every chapter in full, facts without C functions
	$(TESTS)
	$(INTERPRETED)
	$(CHAPTERS)
	$(FACTS)
	$(FACTS_WITHOUT_C)

test-emulated: $(DEV_STAMP) ## run the C functions with the instructions of other processors (SIMDe, qemu: CONTRIBUTING.md)
	$(PY) -m pytest -n 0 -p no:nbval -rs tests/quantization/test_emulated_products.py tests/ops/test_c_emulated.py \
		tests/ops/test_c_simde.py

test-browser: $(DEV_STAMP) ## set up selenium, and test the pages in Chromium, which must be installed with chromedriver
	$(PY) -m pip install -q -e '.[browser]' -c constraints.txt
	$(PY) -m pytest -n 0 -p no:nbval -rs tests/trace/test_browser.py tests/serving/test_live_trace_browser.py \
		tests/serving/test_playground.py tests/serving/test_playground_views.py tests/serving/test_playground_requests.py tests/course/test_lab_browser.py

test-clients: $(DEV_STAMP) $(PEERS_DIR)/clients/.installed ## set up other projects' clients (1 GB), and run them against minillm serve
	$(PY) -m pytest -n 0 -p no:nbval tests/clients

test-external: $(DEV_STAMP) ## download a real chat model and a real tokenizer (110 MB), and compare with transformers
	MINILLM_EXTERNAL=1 $(PY) -m pytest -n 0 -p no:nbval -rs tests/external

notebooks: $(DEV_STAMP) ## run every chapter in full and compare its facts
	$(CHAPTERS)

# oneDNN looks at the processor by itself: where it finds AMX and torch may not, bf16 attention fails.
FACTS = ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MINILLM_QUICK=1 $(CHAPTERS)

FACTS_WITHOUT_C = MINILLM_C_ISA=none MINILLM_QUICK=1 $(CHAPTERS)

facts: $(DEV_STAMP) ## the same in a hurry and without bf16 instructions: no fact may notice
	$(FACTS)

facts-without-c: $(DEV_STAMP) ## the same with torch in place of the C functions
	$(FACTS_WITHOUT_C)

stale: $(DEV_STAMP) ## measure a chapter again after a change of the code it times (CHAPTER=03)
	@$(PY) notebooks/execute.py --stale $(CHAPTER)

bundle: $(COURSE_STAMP) ## the course in one zip, for machines without a network: dist/
	@$(PY) notebooks/bundle.py $(ARGS)

slides: $(COURSE_STAMP) ## a deck of slides for each chapter, or for one (CHAPTER=06), in dist/slides/
	@$(PY) notebooks/slides.py $(CHAPTER)

# On a rented machine there may be no network: no environment is made and nothing is installed.
OUT ?= gpu-results
SECONDS ?= 540
gpu: ## on a GPU: check and measure everything within SECONDS=540, into OUT=gpu-results (ARGS="--help"; no set-up)
	@PYTHONPATH=.:kernels:$$PYTHONPATH $(or $(PYTHON),python3) -m minillm.lab.gpu --out $(OUT) --seconds $(SECONDS) $(ARGS)

# The engines of `minillm bench --vs`, each in an environment of its own; transformers is in $(VENV).
# What exists for CUDA only is left out, and the package of FILE-alone.txt comes without what it asks
# for. PEERS=vllm makes one of them. Where the index has torch only with several GB of CUDA, name one
# that has its CPU build: PEERS_PIP="--extra-index-url ...".
PEERS_PIP ?=
peers: $(DEV_STAMP) $(PEERS:%=$(PEERS_DIR)/%/.installed) ## set up the engines that minillm bench --vs compares with (3 GB)

$(PEERS_DIR)/%/.installed: minillm/lab/benchmarks/peers/%.txt minillm/lab/benchmarks/peers/%-alone.txt | $(PY)
	@echo "Installing $* into $(@D), once (details: $(@D)/install.log)."
	@$(PY) -m venv $(@D)
	@pip() { $(@D)/bin/python -m pip install --disable-pip-version-check $(PEERS_PIP) "$$@"; }; \
	{ pip -r $< && pip --no-deps -r $(word 2,$^); } > $(@D)/install.log 2>&1 \
	  || { echo "The installation failed. The last lines of its log:"; \
	       tail -n 15 $(@D)/install.log; exit 1; } >&2
	@touch $@

clean: ## remove the environment and everything generated
	rm -rf $(VENV) $(PEERS_DIR) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Make follows the link $(PY), so an environment whose interpreter was uninstalled is rebuilt.
CANDIDATES := $(or $(PYTHON),python3.12 python3.11 python3.13 python3 python)
$(PY):
	@found=; \
	for python in $(CANDIDATES); do \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  found=$$python; \
	  $$python -c 'import ensurepip, venv' 2>/dev/null || continue; \
	  echo "Creating $(VENV) with $$python ($$($$python --version))."; \
	  exec $$python -m venv --clear $(VENV); \
	done; \
	if [ -n "$$found" ]; then \
	  echo "$$found cannot create environments: install its venv module (on Debian and" \
	    "Ubuntu: apt install python3-venv), then run make again."; \
	else \
	  echo "minillm needs Python 3.11 or newer, and none of these is: $(CANDIDATES)." \
	    "Install one, or name it: make run PYTHON=/path/to/python3.12"; \
	fi >&2; exit 1

$(RUN_STAMP): $(PY) pyproject.toml constraints.txt
	$(call install,.)
	@touch $@

$(COURSE_STAMP): $(PY) pyproject.toml constraints.txt
	$(call install,.[course])
	@touch $(RUN_STAMP) $@

$(DEV_STAMP): $(PY) pyproject.toml constraints.txt
	$(call install,.[dev])
	@touch $(RUN_STAMP) $(COURSE_STAMP) $@

# pip says a line or more per package; the screen gets the downloads with their sizes, the log
# gets everything. setuptools comes first, so that the build needs nothing that is not pinned.
LOG := $(VENV)/install.log
define install
@echo "Installing the pinned packages, once (details: $(LOG))."
@set -o pipefail; \
pip() { $(PY) -m pip install --disable-pip-version-check -c constraints.txt "$$@"; }; \
{ $(PY) -m ensurepip && pip setuptools && pip --no-build-isolation -e '$(1)'; } 2>&1 \
  | tee $(LOG) \
  | sed -n -e '/\.metadata/d' -e 's/^ *\(Downloading\) .*\//  \1 /p;t' \
      -e 's/^ *\(Downloading .*\)/  \1/p;t' -e 's/^\(Installing\) collected.*/  \1 .../p' \
  || { echo "The installation failed. The last lines of $(LOG):"; tail -n 15 $(LOG); exit 1; } >&2
endef
