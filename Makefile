# make demo    a real answer from a real model: makes .venv and downloads the model (93 MB) on the first run
# make test    everything CI runs: lint, types, floors, tests, smoke claims, docs
# make nightly what takes hours: tests marked so, fuzzing, sanitizers, mutation (make -k nightly goes on after a failure)
# make lint | docs | bench | claims | gallery
#
# PYTHON=python3.12   the interpreter for .venv (default: the first python3 that is new enough)
# CUDA=1              take the CUDA build of torch instead of the CPU one
# PYTEST="-k words"   what pytest is given (default: two processes, each with whole files)
# FUZZ_SECONDS=60     how long `make fuzz` gives each of its targets (default: 300)
# MUTATION=nn/attention/attention   the modules of `make mutation` (default: all core modules)
# CXX=clang++         the C++ compiler for the native kernels (default: c++, g++ or clang++)

VENV := .venv
BIN := $(VENV)/bin
export PYTHON CUDA
PYTEST ?= -n 2 --dist loadfile
FUZZ_SECONDS ?= 300

.DEFAULT_GOAL := demo
.NOTPARALLEL:
.PHONY: demo test lint tests smoke docs nightly nightly-tests fuzz sanitize mutation bench claims gallery clean

demo: $(VENV)/.run
	@$(BIN)/python examples/demo.py

test: lint tests smoke docs

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

tests: $(VENV)/.dev
	$(BIN)/python -m pytest $(PYTEST)

# The committed evidence is that of the larger scales; a smoke run only shows that every claim still runs. Two at once.
smoke: $(VENV)/.dev
	$(BIN)/pippin claims list --json | $(BIN)/python -c "import json, sys; print(*(each['id'] for each in json.load(sys.stdin)))" \
		| OMP_NUM_THREADS=1 xargs -n 5 -P 2 $(BIN)/pippin claims run --scale smoke --results build/smoke

docs: $(VENV)/.dev
	$(BIN)/python tools/generate_docs.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

nightly: nightly-tests fuzz sanitize mutation

nightly-tests: $(VENV)/.nightly
	$(BIN)/python -m pytest $(PYTEST) -m nightly
	$(BIN)/python -m pytest $(PYTEST) --hypothesis-profile=nightly -m hypothesis

fuzz: $(VENV)/.nightly
	$(BIN)/python tools/fuzz.py --seconds $(FUZZ_SECONDS)

# The C++ program first, then the tests from Python over a library that is built with the same checks.
sanitize: $(VENV)/.dev
	tools/sanitize.sh
	PYTHON=$(BIN)/python tools/sanitize_tests.sh

mutation: $(VENV)/.nightly
	$(BIN)/python tools/mutation.py $(MUTATION)

bench: $(VENV)/.dev
	$(BIN)/python tools/run_benchmarks.py $(BENCH)

claims: $(VENV)/.dev
	$(BIN)/pippin claims run --all --scale laptop
	$(BIN)/pippin claims report

# Trains what is missing of its models: about an hour. Needs the sets that the script names (pippin pull).
gallery: $(VENV)/.dev
	$(BIN)/python tools/make_gallery.py $(GALLERY)

clean:
	rm -rf build site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

# Stamps: a second make starts at once, a changed pyproject.toml or kernel installs again.
BUILT_FROM := pyproject.toml setup.py tools/peers.txt $(wildcard native/*)

$(VENV)/.run: $(BUILT_FROM)
	@tools/venv.sh $(VENV)
	@touch $@

$(VENV)/.dev: $(BUILT_FROM)
	@tools/venv.sh $(VENV) plot,image,bayes,train,serve,mcp,ray,export,export-apple,claims,test,bench,docs,dev
	@touch $@ $(VENV)/.run

$(VENV)/.nightly: $(BUILT_FROM) $(VENV)/.dev
	@tools/venv.sh $(VENV) nightly
	@touch $@ $(VENV)/.dev $(VENV)/.run
