# Every target sets up what it needs on a fresh machine, shows what it does, and repeats nothing
# that is up to date. tools/environment.py says which torch is used; `make` alone lists the targets.
#
# PYTHON=python3.12 chooses the interpreter; TORCH_CUBIN_ARCHS=sm_90a (or all) the architectures to
# build; MAX_JOBS the compilers at a time; PYTEST='-k matmul' adds arguments to pytest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/ready
LIBRARY := torch_cubin/_C.so
HOST_SOURCES := $(shell find csrc -path csrc/kernels -prune -o \
	\( -name '*.c' -o -name '*.cpp' -o -name '*.h' -o -name '*.map' \) -print) \
	$(shell find csrc/kernels -name '*.h') \
	torch_cubin/include/torch_cubin/abi.h
FORMATTED := $(shell find csrc tests examples/cpp torch_cubin/include -name "*.cubin.cpp" -prune -o \( -name '*.c' -o -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) -print)
SCRIPTS := .ci/run $(wildcard tools/*.sh)

# PyTorch is installed without byte code (tools/environment.py). Where Python is set to write none,
# each of the hundreds of Pythons that the tests start would compile what it imports of it anew (3 s
# of torch._dynamo's 6): here they keep it, outside the sources.
ifdef PYTHONDONTWRITEBYTECODE
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/build/pycache
endif

.PHONY: help demo test thread-test kernel-test fault-cases transformers-scan gpu-test lint format
.PHONY: triton-test hub-test torch-test
.PHONY: tidy compile-commands report docs bench build wheel hub clean environment

help:
	@echo 'make demo    a first look: kernels at work on a real model (no GPU: on the CPU reference)'
	@echo 'make test    build, then every test; those for a GPU are skipped and counted without one'
	@echo 'make gpu-test  the tests that need a GPU, side by side, and their record'
	@echo 'make thread-test  first uses by 32 threads under ThreadSanitizer'
	@echo 'make kernel-test  the kernels of every architecture, and the tests of them (every night)'
	@echo 'make fault-cases  the table of 45 fault cases: the definitions, and which tests show them'
	@echo 'make triton-test  the tests of Triton kernels with every version of Triton from 3.3 on (every night)'
	@echo 'make hub-test  loads the package by the library `kernels` (every night)'
	@echo 'make torch-test  what stands on PyTorch internals, with a newer torch (every night)'
	@echo 'make transformers-scan  every model type of transformers under "cubin" against "eager", and its list'
	@echo 'make lint    format, lint, and an audit of what the built library needs'
	@echo 'make format  rewrites the sources as `make lint` wants them'
	@echo 'make tidy    clang-tidy over all of the C++ (`make lint`: over what differs from main)'
	@echo 'make compile-commands  build/compile_commands.json, for clangd'
	@echo 'make docs    the documentation site in build/site, offline once its packages are there'
	@echo 'make report  docs/performance.md, the README table and the plots, from benchmarks/results/'
	@echo 'make bench   speed against torch.matmul (needs a GPU)'
	@echo 'make build   the library and the kernels of every architecture'
	@echo 'make wheel   a wheel in dist/, tagged by what it really needs'
	@echo 'make hub     the wheel as a kernel of the Hugging Face hub, in dist/hub'
	@echo 'make clean   removes what was built; .venv stays'

environment: $(READY)

$(READY): requirements-dev.txt tools/environment.py
	@$(PYTHON) tools/environment.py

# Kernels have their own rules below; this is the C++ alone.
$(LIBRARY): $(HOST_SOURCES) setup.py | $(READY)
	@echo "library: compiling $(words $(filter %.cpp,$(HOST_SOURCES))) C++ files (about a minute)"
	@mkdir -p build && touch build/library.begun  # a source that changes meanwhile is newer
	@PATH="$$PWD/.venv/bin:$$PATH" TORCH_CUBIN_SKIP_KERNELS=1 $(PY) setup.py -q build_ext --inplace \
		> build/library.log 2>&1 || { grep -vE '^\[[0-9]+/[0-9]+\] ' build/library.log >&2; exit 1; }
	@grep -E ' warning: ' build/library.log || true
	@touch -r build/library.begun $@

# Kernels need nothing of .venv where the machine has a CUDA toolkit: then they are built while it
# is made, and beside the library. That takes a fresh clone half a minute less.
KERNELS_PY := $(shell $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null \
	&& $(PYTHON) csrc/kernels/build/toolkit.py > /dev/null 2>&1 && echo $(PYTHON) || echo $(PY))

.PHONY: kernels-demo kernels-test kernels-all built-demo built-test
kernels-demo kernels-test kernels-all: kernels-%: | $(if $(filter $(PY),$(KERNELS_PY)),$(READY))
	@$(KERNELS_PY) tools/kernels.py $*

built-demo built-test: built-%:
	@$(MAKE) --no-print-directory -j2 $(LIBRARY) kernels-$*

demo: built-demo
	@$(PY) -m torch_cubin demo

# A file's tests stay in one process, and the files keep their order: the slowest come first
# (tests/conftest.py). On a GPU eight processes share it at most.
test: built-test
	@$(PY) -m pytest --numprocesses $$($(PY) -c 'import os; print(min(8, os.cpu_count() or 1))') \
		--dist loadfile --no-loadscope-reorder --durations 10 $(PYTEST)

thread-test: | $(READY)
	@$(PY) tests/threads/run.py

# What `make test` does for one architecture (tools/kernels.py), for all of a wheel.
kernel-test: build
	@$(PY) -m pytest tests/unit/test_kernel_sass.py tests/unit/test_packaging.py

fault-cases: built-test
	@$(PY) tools/fault_cases.py

transformers-scan: $(LIBRARY) | $(READY)
	@$(PY) tools/transformers_scan.py --out docs/transformers_scan.json

triton-test: $(LIBRARY) | $(READY)
	@$(PY) tools/library_versions.py triton

hub-test: $(LIBRARY) | $(READY)
	@$(PY) tools/library_versions.py kernels

torch-test: $(LIBRARY) | $(READY)
	@$(PY) tools/library_versions.py torch

gpu-test: built-demo
	@$(PY) tools/gpu_tests.py $(PYTEST)

# Its parts at the same time; each prints what it has once it is done.
lint: $(LIBRARY)
	@$(MAKE) --no-print-directory -j2 --output-sync lint-python lint-cpp lint-texts

.PHONY: lint-python lint-cpp lint-texts
lint-python:
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

lint-cpp:
	@$(PY) -c 'from clang_format import clang_format; clang_format()' --dry-run -Werror $(FORMATTED)
	@$(PY) tools/abi_audit.py $(LIBRARY)
	@$(PY) tools/tidy.py --changed

lint-texts:
	@$(PY) tools/links.py
	@$(PY) tools/words.py --check
	@$(PY) tools/columns.py --check
	@for script in $(SCRIPTS); do bash -n "$$script"; done

tidy: $(LIBRARY)
	@$(PY) tools/tidy.py

compile-commands: $(LIBRARY)
	@$(PY) tools/compile_commands.py

format: | $(READY)
	@$(PY) -m ruff check --fix --quiet . || true
	@$(PY) -m ruff format --quiet .
	@$(PY) -c 'from clang_format import clang_format; clang_format()' -i $(FORMATTED)

# What plots and site need is installed when it is first asked for.
.venv/docs-ready: requirements-docs.txt | $(READY)
	@$(PY) -m pip install -qq --no-deps --disable-pip-version-check -r $<
	@touch $@

report: .venv/docs-ready
	@$(PY) benchmarks/report.py

docs: .venv/docs-ready
	@NO_MKDOCS_2_WARNING=1 $(PY) tools/docs_site.py
	@echo 'docs: build/site/index.html'

bench: $(LIBRARY) kernels-demo
	@if $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	then $(PY) benchmarks/bench_matmul.py $(BENCH); \
	else echo 'bench: measures kernels on a GPU, and torch finds none here: nothing was measured'; fi

build: $(LIBRARY) kernels-all

wheel: $(READY)
	@PATH="$$PWD/.venv/bin:$$PATH" TORCH_CUBIN_ARCHS="$${TORCH_CUBIN_ARCHS:-all}" $(PY) -m pip wheel --quiet --disable-pip-version-check \
		--no-build-isolation --no-deps --wheel-dir dist .
	@$(PY) tools/portability.py --tag dist

hub: wheel
	@$(PY) tools/hub.py dist/torch_cubin-*.whl

clean:
	rm -rf build dist torch_cubin/cubins torch_cubin/_C.so torch_cubin/_launch.abi3.so torch_cubin.egg-info
	rm -rf torch_cubin/lib/libtorch_cubin.*
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
