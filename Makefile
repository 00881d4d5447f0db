# The workspace's commands. `make demo` and `make test` set everything up from a fresh clone and need no other step.

PYTHON ?= python3
VENV   ?= .venv
# The torch to install; a CUDA build or another version by `make TORCH=... test`.
TORCH  ?= torch==2.13.0

BIN      := $(VENV)/bin
STAMP    := $(VENV)/.installed
PACKAGES := core observe testkit tools plugins/noop plugins/recording plugins/redis_store plugins/shm_store plugins/tq_simple \
            plugins/tq_mooncake plugins/tq_mooncake_non_cuda integrations compat
SOURCES  := $(wildcard $(addsuffix /src,$(PACKAGES)))
REQUIRED := requirements-dev.txt requirements-docs.txt
# The exact versions of all that the environment holds, so that a new release of another project changes nothing here.
LOCK     := requirements-lock.txt
PROJECTS := pyproject.toml $(REQUIRED) $(LOCK) $(addsuffix /pyproject.toml,$(PACKAGES))
PINNED   := -c $(LOCK)

# One thread per process: two cores are shared by several workers, and results repeat bit for bit.
export OMP_NUM_THREADS ?= 1

# Tests start hundreds of Python processes. Each would compile the sources again if none may keep the compiled ones.
unexport PYTHONDONTWRITEBYTECODE

# Temporary files of tests lie in memory where it has room: a sync waits for no disk there. They kill processes, not
# machines, so it proves the same.
ifneq ($(shell [ "$$(df --output=avail /dev/shm 2>/dev/null | tail -1)" -gt 4000000 ] 2>/dev/null && echo roomy),)
export PYTEST_DEBUG_TEMPROOT ?= /dev/shm
endif

# The tests of one file share its servers, so a file runs in one process. `make test` uses as many processes as cores,
# `make test-engines` more, since its tests mostly wait for other processes.
JOBS   ?= 2
PYTEST  = $(BIN)/python -m pytest --numprocesses $(JOBS) --no-loadscope-reorder --dist
# The first has the longest test: begun last, it would keep one worker busy when the others have nothing left.
ENGINES = testkit/tests/engines $(filter-out testkit/%,$(wildcard plugins/*/tests/engines tests/engines */tests/engines))
QUICK   = plugins integrations/tests tests testkit/tests core/tests compat/tests tools/tests observe/tests
LONG    = $(wildcard plugins/*/tests/long tests/long */tests/long)

# Trainers need versions of their own, so each has an environment of its own, .venv-NAME, and its tests.
TRAINERS       := trl verl areal skyrl
REQUIRED_trl   := examples/trl/requirements.txt
TESTS_trl      := examples/trl/tests
$(foreach t,verl areal skyrl,$(eval REQUIRED_$(t) := tests/long/$(t)/requirements.txt))
$(foreach t,verl areal skyrl,$(eval TESTS_$(t) := -c tests/long/$(t)/pytest.ini --rootdir tests/long/$(t) tests/long/$(t)))
# Their dependencies bring CUDA, so they are installed without them. What we use of them needs those that are required.
ALONE_areal    := areal==1.0.4
ALONE_skyrl    := skyrl==0.3.0

# The oldest versions that the packages below say they accept, in an environment of its own. The wheel of torch from PyPI
# brings CUDA (3 GB): give the name of another one by TORCH_MINIMUM.
MINIMUM       := core observe plugins/noop plugins/shm_store plugins/redis_store
TORCH_MINIMUM ?= torch==2.7.0
# Not run: what needs datasets or Ray, whose own bounds are higher, or looks at all packages or at a new tensordict. And
# old versions of tensordict warn of lists in a TensorDict.
UNLIKE_MINIMUM := $(addprefix --ignore core/tests/,batch/test_inputs.py codec/test_wire.py \
	house/test_public_names.py) \
	-W "ignore:You are setting a list of elements:FutureWarning"

.PHONY: help setup lock demo test test-engines test-long test-minimum $(addprefix test-,$(TRAINERS)) check format fuzz \
	mutants toys backends-page docs wheels clean

help:  ## List the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## Create the virtual environment with every package of the workspace

$(STAMP): $(PROJECTS) scripts/system_packages.sh
	@PYTHON=$(PYTHON) bash scripts/system_packages.sh
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet $(PINNED) $(foreach r,$(REQUIRED),-r $(r)) $(foreach p,$(PACKAGES),-e ./$(p))
	@touch $@

lock:  ## Pin the newest versions that the requirements accept, in requirements-lock.txt
	rm -rf .venv-lock
	$(MAKE) setup VENV=.venv-lock PINNED=
	.venv-lock/bin/python -m pip freeze --exclude-editable | grep -v '^torch==' > $(LOCK)
	rm -rf .venv-lock

demo: setup  ## Run GRPO through the data plane: progress, a reward curve and a picture under out/
	$(BIN)/python examples/grpo.py
	$(BIN)/dataplane audit out/events --html out/run.html
	PYTHONPATH=examples $(BIN)/dataplane read out/last_step --tokenizer grpo:decode --html out/answers.html

test: setup  ## Run the quick tests (5 minutes on 2 cores)
	DATAPLANE_HYPOTHESIS_PROFILE=brief $(PYTEST) loadfile

test-engines: JOBS = 3
test-engines: setup  ## Run the tests with Ray, Mooncake, clusters, hosts, kills, wheels, pages and whole GRPO runs
	@bash scripts/system_packages.sh tests
	DATAPLANE_CONFORMANCE_KILLS=6 $(BIN)/python scripts/test_engines.py $(PYTEST) loadgroup $(ENGINES)

test-long: setup  ## Run all tests with seeds and counts turned up, forged bytes, then those of other trainers
	@bash scripts/system_packages.sh tests
	DATAPLANE_HYPOTHESIS_PROFILE=long $(PYTEST) loadgroup $(ENGINES) $(LONG) $(QUICK)
	$(MAKE) fuzz INPUTS=450000
	$(MAKE) $(addprefix test-,$(TRAINERS))

test-minimum: .venv-minimum/.installed  ## Run the tests of core, observe, noop, shm_store, redis_store with the oldest versions
	.venv-minimum/bin/python -m pytest $(UNLIKE_MINIMUM) $(addsuffix /tests,$(MINIMUM))

.venv-minimum/.installed: $(addsuffix /pyproject.toml,$(MINIMUM)) scripts/lower_bounds.py tests/minimum.txt
	@PYTHON=$(PYTHON) bash scripts/system_packages.sh
	test -x .venv-minimum/bin/python || $(PYTHON) -m venv .venv-minimum
	.venv-minimum/bin/python -m pip install --quiet --upgrade pip
	$(PYTHON) scripts/lower_bounds.py $(MINIMUM) | grep -v ^torch== > .venv-minimum/constraints.txt
	.venv-minimum/bin/python -m pip install --quiet "$(TORCH_MINIMUM)"
	.venv-minimum/bin/python -m pip install --quiet -c .venv-minimum/constraints.txt -r tests/minimum.txt
	@touch $@

test-trl:  ## Run the tests of examples/trl, in an environment of its own
test-verl:  ## Run the tests with verl, in an environment of its own
test-areal:  ## Run the tests with AReaL, in an environment of its own
test-skyrl:  ## Run the tests with SkyRL, in an environment of its own

$(addprefix test-,$(TRAINERS)): test-%: .venv-%/.installed
	.venv-$*/bin/python -m pytest $(TESTS_$*)

.SECONDEXPANSION:
.venv-%/.installed: $$(REQUIRED_$$*) $(PROJECTS) scripts/system_packages.sh
	@PYTHON=$(PYTHON) bash scripts/system_packages.sh
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --upgrade pip
	.venv-$*/bin/python -m pip install --quiet "$(TORCH)"
	.venv-$*/bin/python -m pip install --quiet -r $(REQUIRED_$*)
	$(if $(ALONE_$*),.venv-$*/bin/python -m pip install --quiet --no-deps $(ALONE_$*))
	@touch $@

check: setup  ## Lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SOURCES) examples/third_party_sqlite/src

format: setup  ## Bring the sources into form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Inputs of `make fuzz` for each decoder.
INPUTS ?= 100000

fuzz: setup  ## Feed forged bytes to every decoder (INPUTS= for each)
	FUZZ_INPUTS=$(INPUTS) $(PYTEST) load --timeout 0 tests/fuzz

# The tier of tests that `make mutants` runs: quick, or engines for all. Any other option of the program by MUTANTS=.
TIER ?= quick

mutants: setup  ## Run the tests against 300 faults in the sources, one at a time (TIER=engines for all tests)
	@bash scripts/system_packages.sh tests
	$(BIN)/python tests/mutants/run.py --tier $(TIER) $(MUTANTS)

toys: setup  ## Run the kit on broken backends, and print how many it finds out (TOYS= their names, or other options)
	$(BIN)/python testkit/tests/toys/run.py $(TOYS)

backends-page: setup  ## Run the conformance kit on every backend and write docs/backends.md
	$(BIN)/python scripts/backends_page.py

docs: setup  ## Build the documentation as a site under site/, and check its links and its reference
	$(BIN)/python -m mkdocs build --strict --quiet
	DATAPLANE_SITE=$(CURDIR)/site $(BIN)/python -m pytest -q tests/long/docs/test_site.py

wheels: setup  ## Build a wheel of every package under dist/
	$(BIN)/python -m pip wheel --quiet --no-deps -w dist $(foreach p,$(PACKAGES),./$(p))

clean:  ## Remove the virtual environment and what runs left behind
	rm -rf $(VENV) .venv-minimum $(addprefix .venv-,$(TRAINERS)) out site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
