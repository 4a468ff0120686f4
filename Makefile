# The two commands of the README are `make demo` and `make test`; both build .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := $(wildcard ssdtrain/storage/*.[ch] ssdtrain/device/*.[ch] ssdtrain/codecs/*.[ch])

# Where the environment forbids it to keep bytecode, each of some hundred processes compiles torch and the frameworks anew.
export PYTHONDONTWRITEBYTECODE =

.PHONY: install demo demo-megatron test test-all test-long test-cuda coverage-cuda lint docs site bench clean

install: $(STAMP)

$(STAMP): pyproject.toml setup.py requirements-dev.txt constraints.txt $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps -e .
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/ssdtrain demo $(DEMO)

# GPT on megatron-core, tensor parallel 2 and pipeline parallel 2 on 4 processes, no GPU; flags: DEMO="--train-iters 5"
demo-megatron: $(STAMP)
	$(BIN)/python -m tests.megatron.demo $(DEMO)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A test that hangs where no signal is heard, inside of C, is ended with the stack of every thread. A file's tests run in one
# of three processes (on two cores: tests of several ranks wait for each other much of the time), each computing with one thread.
PYTEST = OMP_NUM_THREADS=1 SSDTRAIN_POISON=1 $(BIN)/python -m pytest -o faulthandler_exit_on_timeout=true
WORKERS = -n 3 --dist loadfile --no-loadscope-reorder -o faulthandler_timeout=960

# Where TESTS names a part, a tier may have no test of it, with which pytest ends with 5.
NONE_OF_PART = || { [ $$? = 5 ] && [ -n "$(TESTS)" ] && echo "$@: $(TESTS) has no test of this tier"; }

# Lint, all tests that are not slow and one row of each layout: about four minutes on two cores. `make test TESTS=tests/storage` runs a
# part.
test: lint
	$(PYTEST) $(WORKERS) -m "not slow and not long" $(TESTS) $(NONE_OF_PART)

# Those and the slow ones, in one run: rows of a matrix share the start of their processes.
test-all: lint
	$(PYTEST) $(WORKERS) -m "not long" $(TESTS) $(NONE_OF_PART)

# What users of GPUs run, on an emulated CUDA device (tests/cuda/emulation/README.md): torch's CUDA build and others, 6 GB that stay until
# requirements-cuda.txt changes, in an environment of its own. No GPU is needed, and none is used.
CUDA := .venv-cuda
EMULATION := $(wildcard tests/cuda/emulation/*.py $(foreach part,runtime operators nccl,tests/cuda/emulation/$(part)/*))

$(CUDA)/.installed: requirements-cuda.txt constraints.txt
	test -x $(CUDA)/bin/python || $(PYTHON) -m venv $(CUDA)
	$(CUDA)/bin/python -m pip install --quiet --no-compile -r requirements-cuda.txt
	touch $@

$(CUDA)/.emulated: $(CUDA)/.installed $(EMULATION)
	$(CUDA)/bin/python tests/cuda/emulation/build.py
	touch $@

$(CUDA)/.built: $(CUDA)/.installed pyproject.toml setup.py $(SOURCES)
	$(CUDA)/bin/python -m pip install --quiet --no-build-isolation --no-deps -e .
	touch $@

# The second run: rows of the frameworks' matrices, trained by the frameworks' own CUDA code through NCCL.
ON_DEVICE = OMP_NUM_THREADS=1 SSDTRAIN_POISON=1 EMULATED_DEVICES=8 $(CUDA)/bin/python -m pytest -o faulthandler_exit_on_timeout=true \
	-n 2 --dist loadfile -o faulthandler_timeout=960

test-cuda: $(CUDA)/.emulated $(CUDA)/.built
	$(ON_DEVICE) -m gpu $(or $(TESTS),tests/cuda tests/gpu tests/test_device.py)
	test -n "$(TESTS)" || TRITON_INTERPRET=1 $(ON_DEVICE) -m gpu tests/codecs/test_kernels.py tests/cuda/test_codecs.py \
		tests/cuda/test_exact.py tests/cuda/test_sections.py tests/cuda/test_state_copies.py
	test -n "$(TESTS)" || SSDTRAIN_TEST_DEVICE=cuda $(ON_DEVICE) \
		-k "(not slow or 1-zero) and not long or 2-zero1-overlap or 2-zero2-overlap" \
		tests/deepspeed/test_matrix.py $(addprefix tests/megatron/test_,matrix.py comm.py estimated_bytes.py pretrain_on_device.py)

# Which of the lines for CUDA the tests of one process run, and which they do not.
coverage-cuda: $(CUDA)/.emulated $(CUDA)/.built
	OMP_NUM_THREADS=1 SSDTRAIN_POISON=1 EMULATED_DEVICES=8 $(CUDA)/bin/python -m tests.cuda.lines

test-long: $(STAMP)
	$(PYTEST) -o faulthandler_timeout=3700 -m long $(TESTS)

docs: $(STAMP)
	$(BIN)/python -m ssdtrain.config.document docs/config.md
	$(BIN)/python -m ssdtrain.tools.report.document docs/metrics.md

# The pages of docs/ in out/site; mkdocs has an environment of its own, so that development installs stay small.
site:
	test -x out/docs-venv/bin/mkdocs || $(PYTHON) -m venv out/docs-venv
	out/docs-venv/bin/python -m pip install --quiet -r requirements-docs.txt
	out/docs-venv/bin/mkdocs build --quiet --strict

bench: $(STAMP)
	$(BIN)/python -m benchmarks.io_engine --json
	$(BIN)/python -m benchmarks.activation --json --model gpt --layers 12

clean:
	rm -rf $(VENV) $(CUDA) build *.egg-info ssdtrain/*/*.so
