# make demo   install, build the base model, train GRPO and Reinforce-Ada, write outputs/demo/
# make test   install, run the whole test suite

PYTHON ?= python3
BIN := .venv/bin
# The models of the demo and the tests are so small that a second thread only waits.
ENVIRONMENT := HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1

.PHONY: demo test lint benchmark clean

# pip installs torch, so that a pip configured for CPU wheels is honoured; uv installs the rest, which pip is slow at.
.venv/installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check uv "$$(grep '^torch==' constraints.txt)"
	$(BIN)/uv pip install --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/installed
	$(ENVIRONMENT) $(BIN)/python -W ignore::FutureWarning -m recipes.arithmetic.demo

test: .venv/installed
	$(ENVIRONMENT) $(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

benchmark: .venv/installed
	$(ENVIRONMENT) $(BIN)/python benchmarks/overhead.py

clean:
	rm -rf .venv outputs
