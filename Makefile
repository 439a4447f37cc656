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

.PHONY: help demo test test-long test-gpu gpu-check reliability simulation-tables bench lint environment dev lock clean
.DEFAULT_GOAL := help

help: ## Say what each target does
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' Makefile

demo: ## Plan two models, share their memory between processes, check every value
	@$(BOOTSTRAP) demo
	@$(BIN)/kvpage demo

test: lint ## Check style, types and the installed wheel (the default tier)
	$(BIN)/pytest $(SIDE_BY_SIDE)

test-long: lint ## The same with 10,000 random examples for each property
	$(BIN)/pytest --tier long -o faulthandler_timeout=1800 $(SIDE_BY_SIDE)

test-gpu: environment ## Only the tests that need an NVIDIA GPU
	$(BIN)/pytest -m gpu tests/gpu

gpu-check: environment ## Measure and check on an NVIDIA GPU what tests cannot, and write docs/gpu-report.md (three minutes)
	$(BIN)/python scripts/gpu_check.py

reliability: environment ## Kill processes at every step, use everything up, and write docs/reliability.md (takes long)
	$(BIN)/python scripts/reliability.py

simulation-tables: environment ## Replay request streams against the layouts and write the tables of docs/planning.md (ten minutes)
	$(BIN)/python scripts/simulation_tables.py

bench: environment ## Measure planning, attaching, import time and memory
	$(BIN)/python benchmarks/run.py

lint: environment ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

environment:
	@$(BOOTSTRAP) test

dev: ## An editable install in .venv-dev
	@$(BOOTSTRAP) dev

lock: ## Resolve constraints.txt again (needs uv); torch and the cuda packages it pins stay out, engines choose their own
	uv pip compile pyproject.toml --extra server --extra dev --universal --python-version 3.11 --upgrade \
	  --no-emit-package cuda-bindings --no-emit-package cuda-core --no-emit-package cuda-pathfinder \
	  --no-annotate --custom-compile-command "make lock" --quiet --output-file constraints.txt

clean: ## Remove what the other targets made
	rm -rf .venv .venv-dev build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
