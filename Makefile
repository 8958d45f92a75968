# Each verb sets up what it needs: a virtual environment in .venv, of the files whose hashes stand in requirements/*.lock (tools/lock.py).
# PYTHON picks the interpreter it is made with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# --no-compile: Python keeps the bytecode of what it imports, which is a tenth of all files.
LOCKED := $(PIP) install --no-deps --no-compile --require-hashes -r requirements
export OMP_NUM_THREADS ?= 1
# It would have every process compile each module that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test suite check bench docs picture site notebooks newcomer gpu-test clean

demo: $(VENV)/.imported ## answer a question with SmolLM2-135M, every kernel ours: interpreted without a GPU, compiled with one
	env -u OMP_NUM_THREADS $(BIN)/tilewright demo # on a CPU it takes as many threads as cores are free

test: $(VENV)/.dev ## what CI runs: the whole CPU suite, and the checks beside it, on two cores
	$(MAKE) --jobs=2 suite check

suite: $(VENV)/.dev ## the whole CPU suite
	$(BIN)/python -m pytest tests/cpu tests/fuzz -q -n 2 --dist worksteal

check: $(VENV)/.dev ## formatting, lint, types, import layers
	$(BIN)/ruff format --check src tests tools benchmarks examples
	$(BIN)/ruff check src tests tools benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.demo ## benchmark every op on the GPU at hand against its peers
	$(BIN)/tilewright bench

docs: $(VENV)/.dev ## the tables of README and docs from benchmarks/results; `make test` fails where they are stale
	$(BIN)/python tools/readme_numbers.py

picture: $(VENV)/.dev ## docs/report.png: the roofline of the report, in few colours
	$(BIN)/tilewright report benchmarks/results/*.jsonl -o $(VENV)/report
	$(BIN)/python -c 'from PIL import Image; Image.open("$(VENV)/report/roofline.png").convert("RGB").quantize(64, dither=0).save("docs/report.png", optimize=True)'

site: $(VENV)/.site ## the web site in build/site: docs, notebooks, API reference, ops gallery, report; no network
	PYTHONPATH=tools NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: $(VENV)/.dev ## run the notebooks, and write their outputs into them
	$(BIN)/python tools/notebooks.py

newcomer: $(VENV)/.dev ## the wheel in an empty environment, where the quickstart is followed to the letter
	$(BIN)/python tools/newcomer.py

gpu-test: $(VENV)/.dev ## the same cases on a GPU
	$(BIN)/python -m pytest tests/gpu -q

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# A torch that .venv has beforehand (`python3 -m venv --system-site-packages .venv`, or installed there) is taken as it is, and make says so.
# Else the CPU build if pip is offered one, else PyPI's build and the packages of CUDA that it needs: all of the locks.
$(VENV)/.torch: $(VENV)/bin/python $(wildcard requirements/torch*.lock)
	@if { ! test -e $@ || grep -q unlocked $@; } && $(BIN)/python -c 'import torch' 2>/dev/null; then \
	    echo 'make: WARNING: the torch found in .venv is taken as it is; its files are not checked against requirements/torch*.lock' >&2; \
	    echo unlocked > $@; \
	elif $(LOCKED)/torch-cpu.lock 2>/dev/null; then echo locked > $@; \
	else \
	    echo "make: pip was offered no CPU build of torch that the lock knows: taking PyPI's" >&2; \
	    $(LOCKED)/torch.lock && echo locked > $@; \
	fi

$(VENV)/.demo: $(VENV)/.torch pyproject.toml requirements/demo.lock
	$(LOCKED)/demo.lock
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

# The bytecode of what the demo imports is made here, not while it answers.
$(VENV)/.imported: $(VENV)/.demo
	$(BIN)/tilewright demo --help > /dev/null
	$(BIN)/python -c 'import gguf, tilewright.launch.table, tilewright.models.command, transformers.modeling_gguf_pytorch_utils, \
	    transformers.models.llama.modeling_llama; from transformers import AutoTokenizer, LlamaTokenizer'
	touch $@

$(VENV)/.dev: $(VENV)/.demo requirements/test.lock
	$(LOCKED)/test.lock
	touch $@

$(VENV)/.site: $(VENV)/.dev requirements/site.lock
	$(LOCKED)/site.lock
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
