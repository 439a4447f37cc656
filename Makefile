# kvpage: `make demo` shows it working, `make test` checks it; both set up .venv by themselves.
# Another Python: make demo PYTHON=python3.12. Another folder: KVPAGE_VENV=/path/to/venv.

PYTHON ?= python3
VENV := $(or $(KVPAGE_VENV),.venv)
BIN := $(VENV)/bin
# -E: no setting of an active environment decides where kvpage is installed.
BOOTSTRAP := $(PYTHON) -E scripts/bootstrap.py

# A file of tests stays in one process: some of its tests look at what the others of it did. Files are taken up in the
# order of tests/conftest.py, the longest first, and not those with the most tests first.
SIDE_BY_SIDE := --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: help demo test test-long test-gpu test-vllm lint durations coverage bench gpu-check reliability simulation-tables \
  audit environment dev hooks lock clean
.DEFAULT_GOAL := help

help: ## Say what each target does
	@awk -F ':.*## ' '/^##@ / { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z-]+:.*## / { printf "  make %-17s  %s\n", $$1, $$2 }' Makefile

##@ Use

demo: ## Plan two models, share their memory, check every value; in a terminal, then the web page
	@$(BOOTSTRAP) demo
	@$(BIN)/kvpage demo

##@ Test

test: lint ## Check style, types and the installed wheel (the default tier)
	$(BIN)/pytest $(SIDE_BY_SIDE)

test-long: lint ## The same with 10,000 random examples for each property, and all cases (hours)
	$(BIN)/pytest --tier long -o faulthandler_timeout=1800 $(SIDE_BY_SIDE)

test-gpu: environment ## Only the tests that need an NVIDIA GPU
	$(BIN)/pytest -m gpu tests/gpu

test-vllm: ## Real vLLM engines on a CPU: stock, on pools, killed (environment of 2.1 GB)
	@$(PYTHON) -E scripts/vllm_check.py

lint: environment ## Check style and types only: ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

##@ Measure

durations: environment ## Run the tests and write what each file of them took into build/durations.md
	$(BIN)/pytest $(SIDE_BY_SIDE) --file-durations build/durations.md

coverage: environment ## Run the tests and say which lines and branches of the library none of them reached (slow)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(SIDE_BY_SIDE)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

bench: environment ## Measure everything beside its peers; writes docs/benchmarks.md (5 minutes; VLLM_SOURCE=folder)
	$(BIN)/python benchmarks/run.py --write

gpu-check: environment ## Measure and check on an NVIDIA GPU what tests cannot; writes docs/gpu-report.md (3 minutes)
	$(BIN)/python scripts/gpu_check.py

##@ Write tables of the documents

reliability: environment ## Kill, use up, attack; writes docs/reliability.md (takes long; PARTS=attack: that part)
	$(BIN)/python scripts/reliability.py $(PARTS)

simulation-tables: environment ## Replay request streams against the layouts; writes docs/planning.md (10 minutes)
	$(BIN)/python scripts/simulation_tables.py

##@ Maintain

audit: ## Known vulnerabilities in constraints.txt? (pip-audit; needs the network)
	@test -x .venv-audit/bin/pip-audit || ($(PYTHON) -m venv .venv-audit && .venv-audit/bin/pip install --quiet pip-audit) \
	  || (rm -rf .venv-audit; echo "NOT AUDITED: pip-audit cannot be installed"; exit 3)
	@$(PYTHON) scripts/audit.py .venv-audit/bin/pip-audit

environment:
	@$(BOOTSTRAP) test

dev: ## An editable install in .venv-dev
	@$(BOOTSTRAP) dev

hooks: dev ## Have git run ruff and mypy before each commit
	.venv-dev/bin/pre-commit install

# Without torch and the cuda packages it pins: engines choose their own.
lock: ## Resolve constraints.txt again (needs uv)
	uv pip compile pyproject.toml --extra server --extra dev --universal --python-version 3.11 --upgrade \
	  --no-emit-package cuda-bindings --no-emit-package cuda-core --no-emit-package cuda-pathfinder \
	  --no-annotate --custom-compile-command "make lock" --quiet --output-file constraints.txt

clean: ## Remove what the other targets made
	rm -rf .venv .venv-audit .venv-vllm .venv-dev build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage .coverage.*
