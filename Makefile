# make serve | make test | make bench: each target first makes the environment that it needs, once, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help serve test test-only test-slow lint docs families layouts kernels-aot kernels-aot-tritons processors bench gpu-check gpu-check-faults gpu-wheels soak fuzz attacks fairness ranks sim sim-mutants speculation-chi2 sleep-cycles rolling-restart manifests journal pauses ray schema-suite own-answers forced-values screenshots formats formats-libraries lora lm-eval clients clean

help:
	@echo "make serve [ARGS=\"--model DIR_OR_HUB_ID --port 9000\"]   start the server"
	@echo "make test [PROCESSES=3] [ARGS=\"-k chat\"]                linter, type checker and every test but the slow ones"
	@echo "make test-only [ARGS=\"-k chat\"]                         the tests of 'make test', without linter and type checker"
	@echo "make test-slow [ARGS=\"-k adapters\"]                     the tests marked as slow"
	@echo "make lint                                               linter, format and type checker"
	@echo "make families [ONLY=\"falcon mpt\"]                       check every model family against its oracle: a table"
	@echo "make layouts                                            load checkpoints in every layout of transformers 4.57 and 5"
	@echo "make kernels-aot                                        compile every GPU kernel; registers, spills, shared memory"
	@echo "make kernels-aot-tritons [TRITONS=\"3.4.0 3.8.0\"]        a few shapes of each kernel with other versions of Triton"
	@echo "make processors                                         the tests of CPU kernels as without AVX, with AVX2, and with AVX-512 without BF16"
	@echo "make bench [ARGS=\"--only vllm --models llama-90m\"]      our server beside vLLM and llama.cpp, which it installs first"
	@echo "make gpu-check [PARTS=\"decode linears\"]                 on a machine with a GPU: tests, kernel times, engine figures"
	@echo "make gpu-check-faults                                   plant faults in every part of gpu-check, on a CPU"
	@echo "make gpu-wheels                                         fetch the packages that such a machine lacks, as wheels"
	@echo "make lora [ARGS=\"--rank 16\"]                            speed of eight LoRA adapters beside the base model"
	@echo "make formats [ARGS=\"--rows gptq,awq --no-speed\"]        perplexity, error, bytes and speed of every weight format"
	@echo "make formats-libraries                                  load checkpoints that torchao, bitsandbytes and others wrote"
	@echo "make lm-eval                                            lm-eval's scores of the server against transformers'"
	@echo "make clients [ONLY=litellm] [EXAMPLES=50]               check openai, langchain, litellm, npm, schemathesis and agents"
	@echo "make soak [REQUESTS=2000] [TOKENS=60]                   many requests, many abandoned: no leak may remain"
	@echo "make fuzz [CASES=5000] [SEED=1]                         hostile requests beside a greedy stream: no 5xx, the same bytes"
	@echo "make attacks [ONLY=NAME_OR_ITEM]                        attacks beside another key: waits, /health, memory, descriptors"
	@echo "make fairness                                           time to first token of a key beside a key that floods"
	@echo "make ranks                                              tensor parallelism on a CPU, and ranks that are killed or stopped"
	@echo "make sim [STEPS=1000000] [SEED=n]                       simulate scheduler, block manager and Driver under virtual time"
	@echo "make sim-mutants                                        plant faults on purpose: the simulation must find each"
	@echo "make speculation-chi2 [DRAWS=1000000]                   draws behind drafts against the model's probabilities"
	@echo "make sleep-cycles [CYCLES=100]                          sleep and wake a real model; look for leaks"
	@echo "make rolling-restart [RESTARTS=10]                      two replicas behind nginx, restarted under load"
	@echo "make manifests                                          render deploy/k8s from the Helm chart"
	@echo "make journal [STREAMS=64]                               kill the Worker under live streams: no stream loses a token"
	@echo "make pauses [STREAMS=32]                                kill and stop Worker and helpers: print the pauses of streams"
	@echo "make ray [ONLY=\"overhead killed\"]                       a Ray cluster of two nodes: routing, scaling, deaths, updates"
	@echo "make schema-suite                                       JSONSchemaTestSuite: schemas accepted, obeyed, refused"
	@echo "make own-answers [ANSWERS=1000]                         send own answers back, forced and cut: none may be refused"
	@echo "make forced-values [SEEDS=400]                          forced JSON at temperature 2: count the usable answers"
	@echo "make screenshots                                        take pictures of the page at / under load, into docs/"
	@echo "make docs                                               write the generated documents and configs/default.yaml"
	@echo "make clean                                              remove everything that these targets made"

# The environment. It is made again only when pyproject.toml changed.

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "pageserve needs $(PYTHON): install Python 3.10 or newer (Debian: apt install python3 python3-venv)."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "pageserve needs Python 3.10 or newer; this is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Python's venv module is missing (Debian: apt install python3-venv)."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# pip's output is printed only if pip fails.
install = $(1)/bin/pip install --quiet $(2) >$(1)/pip.log 2>&1 || { cat $(1)/pip.log; exit 1; }

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing the dependencies into $(VENV): this takes some minutes, torch is large ..."
	@$(call install,$(VENV),--editable .)
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing the dependencies of the tests ..."
	@$(call install,$(VENV),--editable ".[test]")
	@touch $@

# Compile all CPU kernels once, here, so that nothing that is measured or tested waits for them. `make serve` does not
# need this: the server compiles the kernels of its model before it is ready, and the rest in the background.
$(VENV)/.compiled: $(VENV)/.installed $(wildcard kernels/*.py kernels/*/*.py kernels/*/*/*.py)
	$(BIN)/python -m kernels.warmup
	@touch $@

serve: $(VENV)/.installed
	@exec $(BIN)/pageserve serve $(ARGS)

# The servers to measure against, each in an environment of its own.
VLLM := .cache/bench/vllm
LLAMA_CPP := .cache/bench/llama
BENCH_MODELS := llama-tiny llama-90m llama-500m

$(VLLM)/.installed: benchmarks/install_vllm.py
	@echo "installing vLLM's CPU build into $(VLLM): this takes some minutes ..."
	@$(PYTHON) benchmarks/install_vllm.py $(VLLM)
	@touch $@

$(LLAMA_CPP)/.installed:
	@echo "building llama.cpp in $(LLAMA_CPP): this takes some minutes ..."
	@$(PYTHON) -m venv $(LLAMA_CPP)
	@$(call install,$(LLAMA_CPP),llama-cpp-python numpy)
	@touch $@

$(BENCH_MODELS:%=.cache/models/%): | $(VENV)/.installed
	@$(BIN)/python benchmarks/make_models.py $(notdir $@)

$(VENV)/.installed-bench: $(VENV)/.installed-test
	@$(call install,$(VENV),--editable ".[bench]")
	@touch $@

bench: $(VENV)/.installed-bench $(VENV)/.compiled $(VLLM)/.installed $(LLAMA_CPP)/.installed | $(BENCH_MODELS:%=.cache/models/%)
	@exec $(BIN)/python -m benchmarks.peers $(ARGS)

# For a machine with a CUDA GPU. Uses the Python that has its torch; makes no environment, needs no network. Ten minutes.
gpu-check:
	@exec $(PYTHON) -m benchmarks.gpu_check $(if $(PARTS),--parts "$(PARTS)") $(ARGS)

gpu-check-faults: $(VENV)/.installed-test $(VENV)/.compiled
	@exec $(BIN)/python -m tests.benchmarks.planted_faults $(ARGS)

# The few packages that a machine with torch, triton and transformers may lack, as wheels for its Python and x86-64.
# Copy .gpu-wheels with the checkout. gpu-check unpacks it beside the machine's own packages and does not change them.
GPU_PYTHON ?= 3.12
GPU_PACKAGES := "msgspec>=0.19" "fastapi>=0.115" "uvicorn>=0.34" "sse-starlette>=3.5" "httptools>=0.6" "pydantic>=2.10" "httpx>=0.28" "prometheus-client>=0.21" "llguidance>=1.9" "jsonschema>=4.23"
gpu-wheels:
	$(PYTHON) -m pip download --quiet --only-binary=:all: --dest .gpu-wheels --python-version $(GPU_PYTHON) --implementation cp \
		$(foreach n,31 28 27 17,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64 $(GPU_PACKAGES)
	@du -sh .gpu-wheels

lora: $(VENV)/.installed-test $(VENV)/.compiled
	@exec $(BIN)/python -m benchmarks.lora $(ARGS)

formats: $(VENV)/.installed-test $(VENV)/.compiled
	@exec $(BIN)/python -m benchmarks.formats $(ARGS)

# The libraries that define the formats, in an environment of their own. AutoGPTQ and AutoAWQ only pack, on the CPU.
FORMAT_LIBRARIES := .cache/format-libraries

$(FORMAT_LIBRARIES)/.installed:
	$(PYTHON) -m venv $(FORMAT_LIBRARIES)
	@$(call install,$(FORMAT_LIBRARIES),"torch==2.13.0" numpy setuptools wheel "transformers==5.23.*" psutil)
	@$(call install,$(FORMAT_LIBRARIES),"torch==2.13.0" compressed-tensors==0.20.0 torchao==0.18.0 bitsandbytes==0.50.2)
	@export BUILD_CUDA_EXT=0 DISABLE_QIGEN=1; $(call install,$(FORMAT_LIBRARIES),--no-deps --no-build-isolation accelerate autoawq==0.2.9 auto-gptq==0.7.1)
	@touch $@

formats-libraries: $(VENV)/.installed-test $(FORMAT_LIBRARIES)/.installed
	@folder=$$(mktemp -d) && trap 'rm -r $$folder' EXIT && $(FORMAT_LIBRARIES)/bin/python -W ignore benchmarks/formats/libraries.py $$folder 2>$$folder/log || { cat $$folder/log; exit 1; } && \
		$(BIN)/python -m benchmarks.formats.check_libraries $$folder

# lm-eval needs its own torch and a hundred other packages, so it gets its own environment.
LM_EVAL := .cache/lm-eval

$(LM_EVAL)/.installed:
	$(PYTHON) -m venv $(LM_EVAL)
	@$(call install,$(LM_EVAL),"torch==2.13.0" "lm-eval[api]==0.4.13" transformers accelerate)
	@touch $@

lm-eval: $(VENV)/.installed-test $(VENV)/.compiled $(LM_EVAL)/.installed
	@exec $(BIN)/python -m benchmarks.lm_eval --lm-eval $(LM_EVAL)/bin/lm_eval $(ARGS)

# These clients need other versions of openai. They are installed one by one: pip's resolver is slow on all at once.
CLIENTS := .cache/clients

$(CLIENTS)/.installed:
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --upgrade pip
	$(foreach package,pytest pytest-asyncio "schemathesis>=4.20" langchain-openai litellm mcp,$(CLIENTS)/bin/pip install --quiet $(package) &&) true
	@touch $@

# Coding agents. Those of npm share a folder. Their newest versions are named, because npm would choose an older one if
# the newest asks for a newer node (they bring their own). aider pins a hundred packages, so it gets an environment.
AGENTS := .cache/agents
NPM_AGENTS := @anthropic-ai/claude-code@latest @openai/codex@latest opencode-ai@latest
AIDER_PYTHON ?= $(PYTHON)

$(AGENTS)/.installed:
	@command -v npm >/dev/null || { echo "npm is missing: the agents cannot be installed (Debian: apt install nodejs npm)."; exit 1; }
	@mkdir -p $(@D)
	npm install --silent --no-fund --no-audit --prefix $(@D) $(NPM_AGENTS)
	@if $(AIDER_PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then \
		$(AIDER_PYTHON) -m venv $(@D)/aider && $(@D)/aider/bin/pip install --quiet aider-chat; \
	else echo "aider wants a Python below 3.13 and will be skipped: make AIDER_PYTHON=python3.12 clients"; fi
	@touch $@

clients: $(VENV)/.installed-test $(VENV)/.compiled $(CLIENTS)/.installed .cache/node/.installed $(AGENTS)/.installed
	@$(BIN)/python -m tests.clients --environment $(CLIENTS) --node .cache/node --agents $(AGENTS) --only "$(ONLY)" --examples $(or $(EXAMPLES),50)

# While pip installs and mypy reads, the second core would be idle: the kernels are compiled beside them.
test:
	@$(MAKE) --no-print-directory --jobs=2 lint $(VENV)/.compiled
	@$(MAKE) --no-print-directory test-only

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Bytecode is kept, whatever the caller's environment says: tests start hundreds of processes that import our code.
FOR_TESTS := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

# Some tests need programs that are not Python packages. If one is missing, make says so and the test is skipped.

.cache/node/.installed:
	@mkdir -p $(@D)
	@if ! command -v node >/dev/null || ! command -v npm >/dev/null; then \
		echo "node is missing: the test of the npm OpenAI client will be skipped (Debian: apt install nodejs npm)."; \
	elif npm install --silent --no-fund --no-audit --prefix $(@D) openai; then touch $@; \
	else echo "npm could not install openai: the test of the npm OpenAI client will be skipped."; fi

.cache/kubernetes/.fetched: tests/deploy/fetch_helm.py | $(VENV)/.installed-test
	@mkdir -p $(@D)
	@if $(BIN)/python -m tests.deploy.fetch_helm $(@D); then touch $@; \
	else echo "helm could not be fetched: the tests of the Helm chart will be skipped."; fi

test-only: $(VENV)/.installed-test $(VENV)/.compiled .cache/node/.installed .cache/kubernetes/.fetched
	@command -v nginx >/dev/null || test -x /usr/sbin/nginx || echo "nginx is missing: its test will be skipped (Debian: apt install nginx-light)."
	@command -v prometheus >/dev/null || echo "prometheus is missing: dashboard and alerts are not run (Debian: apt install prometheus)."
	@command -v chromium >/dev/null || echo "chromium is missing: the page is not tested in a browser (Debian: apt install chromium)."
	$(FOR_TESTS) $(BIN)/python -m pytest -n $(or $(PROCESSES),3) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(VENV)/.installed-test $(VENV)/.compiled
	$(FOR_TESTS) $(BIN)/python -m pytest -n $(or $(PROCESSES),2) --dist worksteal -m slow $(ARGS)

families: $(VENV)/.installed-test $(VENV)/.compiled
	@$(FOR_TESTS) $(BIN)/python -W ignore -m tests.engine.models.families_table $(ONLY)

layouts: $(VENV)/.installed-test $(VENV)/.compiled
	$(BIN)/python -m tests.checkpoint_layouts

# `make test` compiles a few shapes of each kernel (tests/kernels/test_triton.py); this target compiles all of them.
kernels-aot: $(VENV)/.installed-test
	@$(BIN)/python -W ignore -m kernels.aot $(ARGS)

# Each version is fetched into a folder of its own, which hides the installed one.
TRITONS ?= 3.4.0 3.5.1 3.6.0 3.7.1 3.8.0
kernels-aot-tritons: $(VENV)/.installed-test
	@for version in $(TRITONS); do \
		folder=.cache/triton/$$version; test -d $$folder || $(BIN)/pip install -q --no-deps --target $$folder triton==$$version || exit 1; \
		PYTHONPATH=$$folder $(BIN)/python -W ignore -m kernels.aot --quick $(ARGS) || exit 1; \
	done

processors: $(VENV)/.installed-test
	$(BIN)/python -m tests.kernels.other_processors $(ARGS)

soak: $(VENV)/.installed-test
	SOAK_REQUESTS=$(or $(REQUESTS),2000) SOAK_TOKENS=$(or $(TOKENS),60) $(BIN)/python -m pytest tests/server/test_soak.py --capture=no $(ARGS)

fuzz: $(VENV)/.installed-test $(VENV)/.compiled
	FUZZ_CASES=$(or $(CASES),5000) FUZZ_SEED=$(or $(SEED),1) $(BIN)/python -m pytest tests/server/test_fuzz.py --capture=no $(ARGS)

attacks: $(VENV)/.installed-test $(VENV)/.compiled
	@exec $(BIN)/python -m tests.attacks --only "$(ONLY)" $(ARGS)

# A rank that is killed, and one that is stopped (SIGSTOP), under 32 streams.
ranks: $(VENV)/.installed-test $(VENV)/.compiled
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 0 tests/engine/test_tensor_parallel.py tests/engine/models/parallel
	OMP_NUM_THREADS=1 RANK_FAULT=SIGSTOP $(BIN)/python -m pytest -q -n 0 tests/engine/test_tensor_parallel.py
	OMP_NUM_THREADS=1 RANKS=4 $(BIN)/python -m pytest -q -n 0 tests/engine/test_tensor_parallel.py tests/engine/test_adapters.py -m "slow or not slow" -k "ranks or rank"

fairness: $(VENV)/.compiled
	@exec $(BIN)/python -m benchmarks.fairness $(ARGS)

sim: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sim $(if $(SEED),--seed $(SEED),--steps $(or $(STEPS),1000000)) $(ARGS)

sim-mutants: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sim --mutants $(ARGS)

speculation-chi2: $(VENV)/.installed-test $(VENV)/.compiled
	DRAFT_DRAWS=$(or $(DRAWS),1000000) $(BIN)/python -m pytest tests/engine/worker/speculation/test_draft_distribution.py --capture=no $(ARGS)

sleep-cycles: $(VENV)/.installed-test $(VENV)/.compiled
	SLEEP_CYCLES=$(or $(CYCLES),100) $(BIN)/python -m pytest tests/engine/test_sleep_of_a_model.py -k cycles --capture=no $(ARGS)

rolling-restart: $(VENV)/.installed-test
	RESTARTS=$(or $(RESTARTS),10) $(BIN)/python -m pytest tests/deploy/test_rolling_restart.py --capture=no $(ARGS)

manifests: .cache/kubernetes/.fetched
	$(BIN)/python deploy/manifests.py .cache/kubernetes/helm

journal: $(VENV)/.installed-test $(VENV)/.compiled
	JOURNAL_STREAMS=$(or $(STREAMS),64) JOURNAL_DTYPES=float32,bfloat16 $(BIN)/python -m pytest tests/server/test_journal.py --capture=no $(ARGS)

pauses: $(VENV)/.installed-test $(VENV)/.compiled
	@exec $(BIN)/python -m tests.server.pauses --streams $(or $(STREAMS),32) $(ARGS)

# Ray has a hundred dependencies, so it gets an environment of its own, over the packages of $(VENV).
RAY := .cache/ray

$(RAY)/.installed: $(VENV)/.installed-test
	$(BIN)/python -m venv $(RAY)
	@$(RAY)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $(RAY)/site
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > "$$(cat $(RAY)/site)/pageserve.pth"
	@$(call install,$(RAY),"ray[serve]==2.60.*")
	@touch $@

RAY_MODEL ?= .cache/models/llama-tiny
ray: $(VENV)/.compiled $(RAY)/.installed
	@test -e $(RAY_MODEL) || $(BIN)/python -m benchmarks.make_models $(notdir $(RAY_MODEL))
	@exec $(RAY)/bin/python -m tests.ray --model $(abspath $(RAY_MODEL)) --only "$(ONLY)" $(ARGS)

# The suite is part of the source distribution of jsonschema.
.cache/schema-suite/.fetched: | $(BIN)/python
	$(BIN)/pip download --quiet --no-deps --no-binary jsonschema --dest $(@D) jsonschema==4.26.0
	@touch $@

schema-suite: $(VENV)/.installed-test .cache/schema-suite/.fetched
	@$(BIN)/python -m benchmarks.schema_suite .cache/schema-suite/jsonschema-4.26.0.tar.gz $(ARGS)

own-answers: $(VENV)/.installed-test $(VENV)/.compiled
	@exec $(BIN)/python -m tests.server.own_answers --answers $(or $(ANSWERS),1000)

forced-values: $(VENV)/.installed-test $(VENV)/.compiled
	@exec $(BIN)/python -m benchmarks.forced_values --seeds $(or $(SEEDS),400) $(ARGS)

screenshots: $(VENV)/.installed-test $(VENV)/.compiled
	$(BIN)/python -m tests.server.screenshots $(ARGS)

docs: $(VENV)/.installed
	$(BIN)/python -m server.commands.config_docs

clean:
	rm -rf $(VENV) build dist *.egg-info .cache .gpu-wheels .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
