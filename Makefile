# Everything starts here: `make demo`, `make demo-tiny`, `make test`. Needs Python 3.11 to 3.13 and make, nothing else.

PYTHON ?= python3
VENV ?= .venv
STATE ?= .seamlessflow
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LOCKS := requirements/torch.lock requirements/dev.lock
CLIENTS := $(patsubst requirements/clients/%.in,.clients/%/.ready,$(wildcard requirements/clients/*.in))

.PHONY: setup engine-sglang engine-vllm contract-engines prove-interruptions clients demo demo-tiny test lint format bench-proxy-env bench-proxy bench-tree bench-sync bench-pipeline bench-learning compare-algorithms compare-zero lock clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train SmolLM2-135M to use a calculator (15 minutes on two cores)"
	@echo "make demo-tiny  the same with a model of 0.13 M parameters (5 minutes)"
	@echo "                both with ENGINE=sglang or ENGINE=vllm: on that server"
	@echo "make test       lint, types and tests"
	@echo "make setup      only make the virtual environment"
	@echo "make clients    make the environments of the real clients that the contract tests run"
	@echo "make engine-sglang  make the environment of the SGLang server on the CPU (1.6 GB, 3 minutes)"
	@echo "make engine-vllm  make the environment of the vLLM server on the CPU (3.4 GB, 4 minutes)"
	@echo "make bench-proxy  measure the proxy against its peers (8 minutes)"
	@echo "make bench-pipeline  compare the pipelines live and simulated on 4 to 10,000 nodes (long; cut, it goes on where it was)"
	@echo "make bench-sync  measure what a weight update costs the agents, on every engine that is built (5 minutes)"
	@echo "make compare-algorithms  compare advantages and losses with TRL's and verl's (2 minutes, 400 MB the first time)"
	@echo "make compare-zero  train the same by every ZeRO stage, by one rank and two, also resumed by others (2 minutes)"
	@echo "make bench-tree  measure training of trees against training row by row (4 minutes)"
	@echo "make bench-learning  prove that it learns, on and off policy, with two models (25 minutes; cut, it goes on where it was)"
	@echo "make contract-engines  run the contract suite on every engine that is built (15 minutes with both servers)"
	@echo "make prove-interruptions  interrupt agents' generations on every engine that is built (30 minutes)"
	@echo "make lock       write the lock files anew"
	@echo "make clean      stop the demos and remove their state"

setup: $(READY)

# Repeated only when a lock file changed. PYTHON may be any of the supported versions.
$(READY): $(LOCKS) pyproject.toml requirements/install.sh
	PYTHON=$(PYTHON) requirements/install.sh $(VENV)
	@touch $@

# With ENGINE=vllm or ENGINE=sglang the same run on that server, once its environment is made; STEPS=N ends it sooner.
ON_ENGINE := $(if $(ENGINE),--engine $(ENGINE)) $(if $(STEPS),--steps $(STEPS))
demo: $(READY)
	@$(BIN)/seamlessflow demo examples/demo.yaml --build examples.models.smollm2 \
	  --build examples.calculator.make_tasks --state $(STATE)/demo$(addprefix -,$(ENGINE)) $(ON_ENGINE)

demo-tiny: $(READY)
	@$(BIN)/seamlessflow demo examples/demo-tiny.yaml --build examples.models.tiny \
	  --state $(STATE)/demo-tiny$(addprefix -,$(ENGINE)) $(ON_ENGINE)

# One environment for each client, out of everything's way; -j makes several at a time.
clients: $(CLIENTS)

.clients/%/.ready: requirements/clients/%.lock requirements/clients.sh | $(READY)
	PYTHON=$(BIN)/python requirements/clients.sh $*

# A real server, in an environment of its own: its pins conflict with the trainer's.
engine-sglang: .engines/sglang/.ready

engine-vllm: .engines/vllm/.ready

.engines/sglang/.ready: requirements/engines/sglang.lock requirements/engines/sglang.sh requirements/torch.lock
	PYTHON=$(PYTHON) requirements/engines/sglang.sh

.engines/vllm/.ready: requirements/engines/vllm.lock requirements/engines/vllm.sh requirements/torch.lock
	PYTHON=$(PYTHON) requirements/engines/vllm.sh

# The contract suite on every engine whose environment is built, and what came of it on the last line.
contract-engines: $(READY)
	@$(BIN)/python -m tests.contract.engines

# Weights change, nodes are pre-empted and engines killed under agents; what came of it is on the last line.
prove-interruptions: $(READY)
	@$(BIN)/python -m tests.contract.interruptions

test: lint
	$(BIN)/mypy
	$(BIN)/pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The peers, each in an environment of its own: about 100 MB.
bench-proxy-env: $(READY)
	PYTHON=$(PYTHON) benchmarks/proxy/peers/install.sh $(CURDIR)/.bench

bench-proxy: bench-proxy-env
	@$(BIN)/python -m benchmarks.proxy

# All pipelines beside each other, live and simulated.
bench-pipeline: $(READY)
	@$(BIN)/python -m benchmarks.pipeline

# What a weight update costs the agents, on every engine that is built.
bench-sync: $(READY)
	@$(BIN)/python -m benchmarks.sync

# Every advantage and loss beside TRL's and verl's, which have an environment of their own.
compare-algorithms: $(READY)
	benchmarks/algorithms/install.sh .bench/algorithms $(VENV)
	@$(BIN)/python -m benchmarks.algorithms .bench/algorithms/bin/python

# Losses of every ZeRO stage side by side.
compare-zero: $(READY)
	@$(BIN)/python -m benchmarks.zero

bench-tree: $(READY)
	@$(BIN)/python -m benchmarks.tree

# Fourteen whole runs; cut, the same command goes on.
bench-learning: $(READY)
	@$(BIN)/python -m benchmarks.learning --state $(STATE)/bench-learning

# pip-tools is no part of the environment; LOCK_TOOL names its pip-compile.
lock:
	requirements/lock.sh

clean:
	@for state in $(STATE)/*/; do \
	  if [ -f "$$state/cluster.json" ]; then $(BIN)/seamlessflow down --state "$$state"; fi; \
	done
	rm -rf $(STATE)
