# Each target echoes the plain command it runs. `make demo` and `make test` need only Python 3.11+, g++ and make.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -ec
PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# Python keeps the bytecode of what it compiles, whatever the environment says: tests and benches start
# hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE
# llama.cpp is the peer of tests and benches; its tools are not needed.
LLAMA_ARGS := -DLLAVA_BUILD=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF
SANITIZE_ENV = PYTHONPATH=$(CURDIR)/build/sanitize LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so) $$(g++ -print-file-name=libstdc++.so.6)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
# Packages by what wants them: `run` to serve, with the tools that compile the kernels; `dev` for tests; `llama`.
LIST := $(PY) -c 'import sys, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; x = p["optional-dependencies"]; dev = x["dev"] + x["cuda"]; kind = lambda d: "run" if d.startswith(("nanobind", "cmake", "ninja")) else "llama" if d.startswith("llama") else "dev"; print("\n".join(d for d, k in [(d, "run") for d in p["dependencies"]] + [(d, kind(d)) for d in dev] if k == sys.argv[1]))'
CMAKE := .venv/bin/cmake -S kernels -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/.venv/bin/ninja -DPython_EXECUTABLE=$(CURDIR)/$(PY) -DCMAKE_BUILD_TYPE=Release
NATIVE := $(shell find kernels -name '*.cpp' -o -name '*.h' -o -name 'CMakeLists.txt' 2>/dev/null)

.PHONY: env wheel native free-order sanitize check-arm check-systemd demo test browser check bench soak docs clients clean

# What serving needs: prebuilt packages, and the kernels compiled in place.
.venv/.run-stamp: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv .venv
	@echo "[1/2] Python packages"
	$(LIST) run > .venv/run.txt && $(PIP) install -qq --upgrade pip && $(PIP) install -qq -r .venv/run.txt
	touch $@

# What tests, benches and checks need besides.
env: .venv/.env-stamp
.venv/.env-stamp: .venv/.run-stamp
	@echo "[env 1/2] Python packages of tests"
	$(LIST) dev > .venv/dev.txt && $(PIP) install -qq -r .venv/dev.txt
	@echo "[env 2/2] llama.cpp, compiled from source: about four minutes on 2 cores"
	$(LIST) llama > .venv/llama.txt && CMAKE_ARGS="$(LLAMA_ARGS)" $(PIP) install -v -r .venv/llama.txt 2>&1 \
	  | awk '/Successfully installed|ERROR|: error:|already satisfied: llama/ {print; fflush()} match($$0, /\[[0-9]+\/[0-9]+\]/) {n++; if (n % 14 == 0) {print "  llama.cpp " substr($$0, RSTART, RLENGTH); fflush()}}'
	touch $@

# In place: kernels/_native*.so lands beside its Python door, and the repository root is on the path.
native: .venv/.native-stamp
.venv/.native-stamp: .venv/.run-stamp pyproject.toml $(NATIVE)
	@echo "[2/2] compiling the kernels"
	mkdir -p build
	$(CMAKE) -B build/native -DBATCHENGINE_IN_PLACE=ON > build/native.log || { cat build/native.log; exit 1; }
	.venv/bin/cmake --build build/native | awk '/^\[[0-9]+\/[0-9]+\] Building/ && ++n % 8 {next} {print; fflush()}'
	rm -f build/native.log
	$(PY) tools/link_env.py
	touch $@

# Two builds beside the product, each a package `kernels` in its own folder: PYTHONPATH=build/sanitize.
build/sanitize/.stamp: .venv/.env-stamp $(NATIVE)
	$(CMAKE) -B build/sanitize -DBATCHENGINE_SANITIZE=ON
	.venv/bin/cmake --build build/sanitize
	touch $@

build/free-order/.stamp: .venv/.env-stamp $(NATIVE)
	$(CMAKE) -B build/free-order -DBATCHENGINE_FREE_ORDER=ON
	.venv/bin/cmake --build build/free-order
	touch $@

free-order: build/free-order/.stamp

# The suites that live in native code, with address and undefined-behaviour sanitizers. Leaks are not
# counted: the interpreter itself keeps memory until it ends.
SANITIZED := tests/kernels/test_attention.py tests/kernels/levels/test_wide_heads.py tests/kernels/test_partials.py tests/kernels/test_linear.py tests/kernels/linear/test_experts.py tests/kernels/linear/test_heads.py tests/kernels/test_sampling.py tests/model/test_model.py
sanitize: .venv/.env-stamp build/sanitize/.stamp
	$(SANITIZE_ENV) $(PY) -P tools/check_sanitizer.py
	$(SANITIZE_ENV) $(PY) -P -m pytest -q --import-mode=append -p no:faulthandler $(SANITIZED)

# Optional: the kernels for aarch64 give the bits of this machine, under emulation. Needs the Debian
# packages g++-aarch64-linux-gnu and qemu-user.
check-arm: env native
	$(PY) -m tools.check_arm

demo: native
	$(PY) -m service.cli.local.demo

# dist/*.whl, installed into a fresh environment and used there.
wheel: env
	$(PIP) wheel -q . --no-build-isolation --no-deps -w dist
	$(PY) tools/check_wheel.py dist

# Tests that measure time run alone, before the others, which find the bytecode of all tests then.
# Plain `pytest` runs all, one by one. Many tests wait for daemons and limits of time, so three run at
# a time on two cores.
test: env native
	$(PY) -m pytest -q -m "alone and not slow"
	$(PY) -m pytest -q -n 3 --dist loadfile -m "not slow and not alone"

# The dashboard in headless Chromium (Debian package chromium).
browser: env native
	$(PY) -m pytest -q -rs -m slow tests/service/http/dashboard/test_browser.py

# The service under a real systemd, in a container. As root; needs the Debian packages debootstrap and
# systemd-container, and the wheel. About four minutes.
check-systemd: wheel
	$(PY) -m tools.check_systemd

check: env native
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright
	.venv/bin/lint-imports

# Hours of kills and of random tests, outside `make test`. One command at a time: --kills, --seconds,
# --every and --seeds make them shorter. The benches end with a RESULT line, the simulation with the
# number of failed seeds; anything lost, wrong or owned twice ends each with an error.
RANDOM_TESTS := tests/policy tests/kv tests/wire tests/engine/linked tests/lanes/ring
soak: env native
	$(PY) -m bench crash --kills 10000 --jobs 4
	$(PY) -m bench crash --model pocket --kills 200
	$(PY) -m bench.kill_points --target engine
	$(PY) -m bench.kill_points --target worker
	$(PY) -m tests.simulation --seeds 5000 --start 1000
	$(PY) -m tests.simulation --linked --seeds 3000 --start 1000
	$(PY) -m pytest -q --hypothesis-profile soak --timeout 3600 $(RANDOM_TESTS)
	GPU_MEMORY_SEEDS=1000 $(PY) -m pytest -q tests/lanes/memory/test_gpu_memory_simulation.py
	$(PY) -m pytest -q -m slow --timeout 3600
	$(PY) -m bench attack
	$(PY) -m bench rolling --rounds 10

bench: env native
	$(PY) -m bench engine
	$(PY) -m bench kernels
	$(PY) -m bench quality
	$(PY) -m bench invariance
	$(PY) -m bench canonical
	$(PY) -m bench store
	$(PY) -m bench router
	$(PY) -m bench grammar
	$(PY) -m bench hop
	$(PY) -m bench promote
	$(PY) -m bench pipeline
	$(PY) -m bench ring
	$(PY) -m bench restart
	$(PY) -m bench agents
	$(PY) -m bench serve
	$(PY) -m bench crash
	$(PY) -m bench failover

# The reference pages of docs/, made from the code.
docs: native
	$(PY) -m tools.make_docs

# Unmodified agents and client libraries. The first run installs them into build/clients: npm, a network,
# and 3 GB of disk; later runs need none and take a few minutes.
clients: native
	$(PY) -m bench clients

clean:
	rm -rf build dist .venv kernels/_native*.so
