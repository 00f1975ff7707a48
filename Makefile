# Every command a newcomer needs. Each sets up what it lacks first: all it takes is Python >= 3.11 with venv.
# `make` alone lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
DOCS_STAMP := $(VENV)/.docs
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq --no-input
# One more than there are cores, since tests that watch other processes wait a fifth of their time. More than four cost
# more in imports and memory than they save.
JOBS ?= $(shell $(PYTHON) -c 'import os; print(min(4, 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)))')

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all slow docs format-check lint types unit fmt bench bench-import bench-client bench-host bench-cpu bench-neighbours bench-memory bench-queue bench-attack bench-constrained bench-faults bench-embedded bench-serving bench-programs train-embedded every-program soak soak-tiers soak-ranks clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with everything (again when pyproject.toml changed)
	@:

demo: $(STAMP) ## run examples/quickstart.py
	$(BIN)/python examples/quickstart.py

test: format-check lint types unit ## formatting, lint, types and the tests that take minutes

test-all: test slow ## everything that CI runs: `make test`, and the tests that take long

format-check: $(STAMP) ## is everything formatted?
	$(BIN)/ruff format --check --quiet .

lint: $(STAMP) ## ruff check
	$(BIN)/ruff check --quiet .

types: $(STAMP) ## mypy --strict over sgl/
	$(BIN)/mypy

unit: $(STAMP) ## the tests alone; ARGS="tests/test_x.py -k name" picks some
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(ARGS)

slow: $(STAMP) $(DOCS_STAMP) ## the tests that `make test` leaves out
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m slow $(ARGS)

docs: $(DOCS_STAMP) ## build the site of docs/ into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

fmt: $(STAMP) ## format, and fix what ruff can fix
	$(BIN)/ruff format --quiet .
	$(BIN)/ruff check --fix --quiet .

bench: bench-import bench-client bench-host bench-cpu ## the benchmarks that need no GPU

bench-import: $(STAMP) ## what `import sgl` costs a program
	$(BIN)/python benchmarks/import_time.py

bench-client: $(STAMP) ## what the language costs a client: programs, threads, forks
	$(BIN)/python benchmarks/client_overhead.py

bench-host: $(STAMP) ## what a step costs the host: scheduling, packing, detokenising
	$(BIN)/python benchmarks/host_overhead.py $(ARGS)

bench-cpu: $(STAMP) ## output tokens/s on this CPU, beside transformers
	$(BIN)/python benchmarks/cpu_throughput.py $(ARGS)

bench-neighbours: $(STAMP) ## what an engine still does on a CPU where others want its cores
	$(BIN)/python benchmarks/cpu_neighbours.py $(ARGS)

bench-memory: $(STAMP) ## resident memory over 10^5 requests; ARGS=CHECKPOINT
	$(BIN)/python benchmarks/memory.py $(ARGS)

bench-queue: $(STAMP) ## µs that each of 10^3 to 10^5 waiting requests costs the engine, by policy
	$(BIN)/python -m benchmarks.waiting_queue $(ARGS)

bench-attack: $(STAMP) ## a plain request beside hostile clients: latency, memory, 5xx, ledger
	$(BIN)/python -m benchmarks.attack $(ARGS)

bench-constrained: $(STAMP) ## what constraints cost a step on this CPU
	$(BIN)/python -m benchmarks.constrained_cpu $(ARGS)

bench-faults: $(STAMP) ## what clients notice when processes of a cluster are killed, and when it is scaled
	$(BIN)/python -m benchmarks.cluster_faults $(ARGS)

bench-embedded: $(STAMP) ## what the embedded model gets right, on held-out and hand-written sentences
	$(BIN)/python benchmarks/embedded_eval.py $(ARGS)

bench-serving: $(STAMP) ## W10, on a GPU: a server under a rate of requests; ARGS="MODEL TOKENIZER"
	$(BIN)/python -m benchmarks.gpu.serving $(ARGS)

bench-programs: $(STAMP) ## W11, on a GPU: whole programs over HTTP, beside SGLang; ARGS="MODEL TOKENIZER --trace"
	$(BIN)/python -m benchmarks.gpu.programs $(ARGS)

train-embedded: $(STAMP) ## make an embedded model anew on one GPU, in ten minutes: CORPORA=FOLDER OUT=FOLDER
	$(BIN)/python -m tools.train_embedded --corpora "$(CORPORA)" --out "$(OUT)" $(ARGS)

every-program: $(STAMP) ## compile all that engines launch for all five GPUs, an hour on a core
	SGL_EVERY_PROGRAM=1 $(BIN)/python -m pytest -n $(JOBS) tests/test_compiled_kernels.py $(ARGS)

soak: $(STAMP) ## a million random scheduler operations under the page ledger
	$(BIN)/python -m benchmarks.scheduler_soak $(ARGS)

soak-tiers: $(STAMP) ## a million random operations over device, host memory and files
	$(BIN)/python -m benchmarks.tiers_soak $(ARGS)

soak-ranks: $(STAMP) ## ten minutes of random finishes and aborts on two ranks; ARGS="MODEL --option …"
	$(BIN)/python -m benchmarks.parallel_soak $(or $(ARGS),embedded --option tp_size=2)

clean: ## remove caches and build output; .venv stays
	rm -rf build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# torch goes first and by its bare version, so that an index offering a CPU build (2.13.0+cpu, which sorts higher)
# is taken at its word; whatever comes after finds the requirement met and fetches no other torch.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "sgl needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "'$(PYTHON)' comes without venv. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV) (minutes, the first time)"
	@$(PIP) install torch==2.13.0
	@$(PIP) install --editable '.[dev]'
	@touch $@

# What builds the site is not needed to work on the code, so only those who ask for it wait for it.
$(DOCS_STAMP): $(STAMP)
	@$(PIP) install --editable '.[docs]'
	@touch $@
