# make demo   shows in two minutes what the callbacks are for; make test   runs the whole suite.
# Both make .venv first, which needs Python 3.11 or newer and nothing else.
PYTHON ?= python3.11
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

# Tests start hundreds of processes: where it is set, each of them would compile the package's files again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast test-cuda coverage lint format types docs check clean
# The commands of the tutorial, docs/index.md, in a folder of their own. The second and the fourth run fail, as they should.
BAD_STEP := lightning_logs/version_3/memtools/nonfinite-step4-rank0.pt
demo: .venv/installed
	rm -rf logs/demo && mkdir -p logs/demo && cp examples/digits.py logs/demo
	set -e; cd logs/demo; export PATH="$(CURDIR)/$(BIN):$$PATH"; set -x; \
		python digits.py --epochs 2; \
		! python digits.py --batch-size 512; \
		python digits.py --fit --epochs 2; \
		! python digits.py --blank; \
		memtools replay $(BAD_STEP) --model digits:Digits; \
		sed -i.before 's|pictures / contrast|pictures / (contrast + 1e-5)|' digits.py; \
		memtools replay $(BAD_STEP) --model digits:Digits; \
		python digits.py --blank
	@echo 'Look at it: $(BIN)/tensorboard --logdir logs/demo/lightning_logs'
	@echo 'then open http://localhost:6006/#lightning_memtools'

# A process for each core, four at most; a file's tests stay in one process, since they share runs.
test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(COVER)

# Lines that both suites run, of each file that they do not run all of. What scripts run in other processes counts too,
# but for those of a dry run, which end before they could write it.
coverage:
	$(MAKE) test COVER="--cov --cov-report="
	$(MAKE) test-cuda COVER="--cov --cov-append --cov-report=term:skip-covered"

test-fast: .venv/installed
	$(BIN)/python -m pytest tests/test_package.py tests/memory tests/state tests/reporting tests/nonfinite/test_diagnose.py \
		tests/checkpointing/test_planning.py tests/batch_size/test_size_search.py --deselect tests/reporting/test_ranks.py

# On PyTorch's CUDA build over stubs of NVIDIA's libraries: the real allocator and CUDA code, no GPU, nothing computed.
# Four GiB: tests that look for the most that fits stay small. Only files that hold such tests are collected; two processes
# share them: the longest first, and then the one that compares peaks, for which nothing else may be on the device.
FIRST_CUDA_TESTS = $(wildcard tests/null_cuda/test_dry_run*.py) tests/null_cuda/test_equal_to_cuda.py
CUDA_TESTS = $(FIRST_CUDA_TESTS) $(filter-out $(FIRST_CUDA_TESTS),$(shell grep -rl cuda_memory tests --include='test_*.py'))
test-cuda: .venv-cuda/installed
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) .venv-cuda/bin/python -m lightning_memtools.null_cuda --capacity 4GiB \
		-m pytest -m cuda_memory -n 2 --dist loadfile --no-loadscope-reorder $(COVER) $(CUDA_TESTS)

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: .venv/installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: .venv/installed
	$(BIN)/mypy

docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: lint types docs test

clean:
	rm -rf .venv .venv-cuda site logs

# torch first and alone: asked for together with the rest, pip may look at newer builds. torchvision and timm come without
# their dependencies, because torchvision asks for a torch build of its own, and lie apart: see tests/zoo.py.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) pip
	$(PIP) torch
	$(PIP) --editable '.[cli,nvml]' --group dev
	$(PIP) --no-deps --target .venv/zoo torchvision timm
	touch $@

# .venv with torch's CUDA build before its own. "===" leaves CPU builds out; without dependencies, because torch would
# bring several GB of NVIDIA's libraries, which the stubs replace.
PACKAGES := import sysconfig; print(sysconfig.get_path("purelib"))
.venv-cuda/installed: .venv/installed
	$(PYTHON) -m venv --clear --without-pip .venv-cuda
	$(BIN)/python -m pip --disable-pip-version-check --python .venv-cuda/bin/python install --quiet --no-deps \
		'torch===$(shell sed -n 's/^torch==//p' constraints.txt)'
	$(BIN)/python -c '$(PACKAGES)' > "$$(.venv-cuda/bin/python -c '$(PACKAGES)')/all_but_torch.pth"
	ln -s ../.venv/zoo .venv-cuda/zoo
	touch $@
