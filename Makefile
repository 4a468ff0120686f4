# The two commands of the README are `make demo` and `make test`; both build .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := $(wildcard ssdtrain/storage/*.[ch] ssdtrain/codecs/*.[ch])

.PHONY: install demo demo-megatron test test-long lint docs bench clean

install: $(STAMP)

$(STAMP): pyproject.toml setup.py requirements-dev.txt $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
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

# A test that hangs where no signal is heard, inside of C, is ended with the stack of every thread.
WATCHDOG = -o faulthandler_exit_on_timeout=true -o faulthandler_timeout

# The offload tests collect garbage after each test, which is slow in a process that has imported every framework: they get a
# process of their own. `make test TESTS=tests/storage` runs a part.
test: lint
ifdef TESTS
	SSDTRAIN_POISON=1 $(BIN)/python -m pytest $(WATCHDOG)=960 -m "not long" $(TESTS)
else
	SSDTRAIN_POISON=1 $(BIN)/python -m pytest $(WATCHDOG)=360 -m "not long" tests/offload
	SSDTRAIN_POISON=1 $(BIN)/python -m pytest $(WATCHDOG)=960 -m "not long" --ignore=tests/offload
endif

test-long: $(STAMP)
	SSDTRAIN_POISON=1 $(BIN)/python -m pytest $(WATCHDOG)=3700 -m long $(TESTS)

docs: $(STAMP)
	$(BIN)/python -m ssdtrain.config.document docs/config.md

bench: $(STAMP)
	$(BIN)/python -m benchmarks.io_engine --json
	$(BIN)/python -m benchmarks.activation --json --model gpt --layers 12

clean:
	rm -rf $(VENV) build *.egg-info ssdtrain/*/*.so
