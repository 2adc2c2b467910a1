PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# PyTorch runs no arithmetic here, so its build without CUDA will do: a tenth of the size of the one on PyPI. Where its
# index cannot be reached, pip warns and takes what the other indexes have.
TORCH := --no-deps --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu torch
# Versions that were tried, of all that is installed.
INSTALL := $(BIN)/pip install --constraint constraints.txt
EXTRA := import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]], sep="\n")
PROMPT := A large orange ball bounces in the middle on a navy background with a loud high tone

.DEFAULT_GOAL := help
.PHONY: help setup compilers resolve demo test lint types check docs clips bench results clean

help: ## List what there is
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/installed ## Make a virtual environment with everything in it (.venv)

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH)
	$(INSTALL) -e '.[test]'
	@touch $@

# Without what they ask for: of NVIDIA's libraries, XLA's compiler needs cuDNN alone. That of GPUs has a folder of its own,
# which the tests and `ltx2 plan` look into: in the environment itself, jax would print an error wherever there is no GPU.
compilers: setup ## Install the compilers of TPUs and GPUs, for tests that need no such chip (1.6 GB)
	$(BIN)/python -c '$(EXTRA)' tpu-compiler | $(INSTALL) --no-deps --requirement /dev/stdin
	rm -rf $(VENV)/gpu-compiler
	$(BIN)/python -c '$(EXTRA)' gpu-compiler | $(INSTALL) --no-deps --upgrade --target $(VENV)/gpu-compiler --requirement /dev/stdin

resolve: setup ## Resolve from PyPI, without installing it, what README.md, docs and all extras install
	$(BIN)/python -m tools.resolve

demo: setup ## Write out/demo.mp4, a video with sound, with the embedded model on this machine
	$(BIN)/ltx2 generate --model demo --prompt "$(PROMPT)" --seed 1 --force -o out/demo.mp4

test: setup ## Run all tests, a file at a time in each of up to four processes
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

lint: setup ## Check style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup ## Check types
	$(BIN)/mypy

check: lint types test ## All three

docs: setup ## Write the table in README.md and docs/commands.md
	$(BIN)/python -m tools.docs

clips: setup ## Make docs/demo.webp, the clips that README.md shows
	$(BIN)/python -m tools.clips

bench: setup ## Measure time and memory beside diffusers
	$(BIN)/python -m benchmarks

results: setup compilers ## Compile clips for TPU slices, those whose rows are out of date: hours
	$(BIN)/python -m benchmarks.plans

clean: ## Remove the virtual environment, caches and builds; videos stay
	rm -rf $(VENV) dist .pytest_cache .ruff_cache .mypy_cache
