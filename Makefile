# `make train`, `make test`, `make lint`: each makes .venv first, with the versions in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: train test notebooks lint format clean

train: .venv/ready
	$(BIN)/torchrun --nproc-per-node $$($(BIN)/python -c 'import torch; print(torch.cuda.device_count() or 2)') train.py $(ARGS)

test: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# Executes them in place: their outputs are kept for reading on the web.
notebooks: .venv/ready
	$(BIN)/python notebooks/execute.py $(ARGS)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first and by its exact version: pip then never looks for a newer one.
.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv
