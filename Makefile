# Each verb sets up what it needs: a virtual environment in .venv, pinned by constraints.txt. PYTHON picks the interpreter it is made with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# PyTorch that is already importable (a CUDA build, say) can be used by making .venv with --system-site-packages beforehand.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test check bench docs picture gpu-test clean

demo: $(VENV)/.demo ## answer a question with SmolLM2-135M, every kernel ours: interpreted without a GPU, compiled with one
	OMP_NUM_THREADS=$$(nproc) $(BIN)/tilewright demo

test: check ## the whole CPU suite: what CI runs
	$(BIN)/python -m pytest tests/cpu -q -n 2 --dist worksteal

check: $(VENV)/.dev ## formatting, lint, types, import layers
	$(BIN)/ruff format --check src tests tools benchmarks
	$(BIN)/ruff check src tests tools benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.demo ## benchmark every op on the GPU at hand against its peers
	$(BIN)/tilewright bench

docs: $(VENV)/.dev ## the tables of README and docs from benchmarks/results; `make test` fails where they are stale
	$(BIN)/python tools/readme_numbers.py

picture: $(VENV)/.dev ## docs/report.png: the top of the report as Chromium draws it
	$(BIN)/tilewright report benchmarks/results/*.jsonl -o $(VENV)/report
	chromium --headless=new --no-sandbox --disable-gpu --hide-scrollbars --window-size=1200,1750 --screenshot=docs/report.png $(VENV)/report/index.html

gpu-test: $(VENV)/.dev ## the same cases on a GPU
	$(BIN)/python -m pytest tests/gpu -q

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: plain `torch` in one resolution with the rest may pick another build than the one at hand.
$(VENV)/.torch: $(VENV)/bin/python constraints.txt
	$(PIP) install -c constraints.txt torch
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml requirements-demo.txt
	$(PIP) install -c constraints.txt -e '.[cuda,models]'
	$(PIP) install --no-deps -r requirements-demo.txt
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) install -c constraints.txt -e '.[cuda,models,serve,bench,dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
