# `make` or `make help` lists the targets. Everything happens in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
# A file of tests runs on one worker: what it makes once is made once. In order: the longest, those in a browser, come first.
SPREAD := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test check format soak bench results samples docs pictures lab clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "nsan needs Python 3.11 or newer, $(PYTHON) is older. Run: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2; rm -rf $(VENV); exit 1; }

# One stamp per set of packages: a second run installs nothing.
$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,lab]'
	@touch $@

$(VENV)/.report: $(VENV)/.base
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[report]'
	@touch $@

$(VENV)/.lab: $(VENV)/.base
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[lab]'
	@touch $@

demo: $(VENV)/.report ## Import captures, print their summaries, and write a report
	$(BIN)/nsan import sample_data/um_vector_add_rtx4060l.sqlite -o demo-output/um_vector_add
	@echo
	$(BIN)/nsan summary demo-output/um_vector_add
	@echo
	@echo 'A capture with page faults, of an older profiler:'
	@echo
	$(BIN)/nsan import sample_data/nvprof_hotspot_v100_1024.log.gz -o demo-output/hotspot
	@echo
	$(BIN)/nsan summary demo-output/hotspot
	@echo
	@echo 'A modelled one, of a program that needs more memory than the GPU has:'
	@echo
	$(BIN)/nsan summary sample_data/model/oversubscribed_sweep/oversubscribed_sweep.sqlite
	@echo
	@echo 'Whose the faults are:'
	@echo
	$(BIN)/nsan attribute sample_data/model/oversubscribed_sweep/oversubscribed_sweep.sqlite
	@echo
	@echo "What PyTorch's caching allocator did:"
	@echo
	$(BIN)/nsan allocator sample_data/snapshots/decomfl_opt125m_full_history.pickle.gz
	@echo
	@echo 'What it does to the driver, in a modelled training step:'
	@echo
	$(BIN)/nsan allocator sample_data/model/pca_on/pca_on.sqlite --snapshot sample_data/model/pca_on/snapshot.pickle
	@echo
	$(BIN)/nsan pca sample_data/model/pca_off sample_data/model/pca_on
	@echo
	@echo 'All of it as one file to send:'
	@echo
	$(BIN)/nsan report sample_data/model/pca_on/pca_on.sqlite -o demo-output/report.html --force-overwrite

test: $(VENV)/.dev ## All tests with small counts and fixed seeds; what CI runs
	$(BIN)/python -m pytest $(SPREAD) -p no:randomly

check: $(VENV)/.dev ## Format, lint, types and the fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(WORKERS) -q -m 'not slow and not nsys' tests/unit nsan

format: $(VENV)/.dev ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

soak: $(VENV)/.dev ## Property and fuzz tests with large counts and random seeds
	NSAN_SOAK=1 $(BIN)/python -m pytest $(SPREAD) -q

bench: $(VENV)/.dev ## Timings as ratios against a reference in the same run (BENCH_ARGS=--large for 5 M faults)
	PYTHONPATH=tests $(BIN)/python -m benchmarks.run $(BENCH_ARGS)
	@echo
	$(BIN)/python -m benchmarks.analyses
	@echo
	PYTHONPATH=tests $(BIN)/python -m benchmarks.allocator
	@echo
	$(BIN)/python -m benchmarks.snapshots
	@echo
	$(BIN)/python -m benchmarks.explorer

results: $(VENV)/.dev ## nsan beside its peers on the same files: benchmarks/RESULTS.md (RESULTS_ARGS=--large for 10 M faults)
	PYTHONPATH=tests $(BIN)/python -m benchmarks.results $(RESULTS_ARGS)

samples: $(VENV)/.dev ## Make the modelled traces of sample_data/model again, row for row
	$(BIN)/nsan model samples -o sample_data/model --force-overwrite

docs: $(VENV)/.base ## Print the reference pages of docs/ again, from the code
	$(BIN)/python docs/generate.py

pictures: $(VENV)/.dev ## Make the pictures of the README again; needs Chromium
	$(BIN)/python docs/pictures.py

lab: $(VENV)/.lab ## JupyterLab on a copy of the explore notebook (TRACE=FILE: on a trace of yours)
	@mkdir -p demo-output
	cd demo-output && ../$(BIN)/nsan lab $(if $(TRACE),'$(abspath $(TRACE))')

clean: ## Remove what was made here
	rm -rf $(VENV) demo-output build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
