# Every target works from a bare clone. `make venv` is the environment of all others but demo.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
PLUGINS := $(sort $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml)))
# Many machines for tests forbid Python to keep compiled files. Hundreds of tests start processes, and each of these would
# compile ddl again, which takes as long as all its other imports.
export PYTHONDONTWRITEBYTECODE :=
ENVIRONMENT := tools/environment.py
PINNED := --constraint constraints.txt

# The demo uses the full environment where there is one, else a small one of its own.
DEMO := $(if $(wildcard $(VENV)/.made),$(VENV),.venv-demo)

# 3.11 first: every framework has wheels for it.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.10; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
NEED_PYTHON = @test -n "$(PYTHON)" || { \
	echo "no Python >= 3.10 with venv found; on Debian: apt-get install python3-venv; or: make PYTHON=/path/to/python"; exit 1; }

.PHONY: help venv demo test test-long test-matrix soak check docs bench release-check clean

help:
	@echo "make venv          creates $(VENV): core and plugins editable, everything tests and examples need"
	@echo "make demo          trains on two ranks; installs only what that needs"
	@echo "make test          the tests that every change must pass; a test that fails runs once more, alone"
	@echo "make test-long     the other tests: they start many processes and hosts, or repeat a claim in other ways"
	@echo "make test-matrix   tests and examples on other versions of Python and of the frameworks, and the table in docs/install.md"
	@echo "make soak          long runs: thousands of generated programs, floods, stalls; not part of CI"
	@echo "make check         ruff, mypy --strict, architecture tests"
	@echo "make docs          the documentation as a site in build/site; fails for a broken link or a page without a place in it"
	@echo "make bench         speed on this host against its targets: fails where one is missed (minutes; leave the machine alone)"
	@echo "make release-check builds every wheel, and uses them in fresh environments as the documentation says"
	@echo "make clean         removes what these have made"

venv: $(VENV)/.made

$(VENV)/.made: pyproject.toml constraints.txt $(addsuffix /pyproject.toml,$(PLUGINS))
	$(NEED_PYTHON)
	@echo "creating $(VENV) with $$($(PYTHON) --version); the first time takes some minutes"
	$(PYTHON) $(ENVIRONMENT) $(VENV) $(PINNED) $(TORCH) -e '.[test,docs]' $(addprefix -e ,$(PLUGINS))
	@# legacy Keras asks for the distribution "tensorflow"; what is installed is its CPU build, under another name
	$(BIN)/python -c 'import sys, importlib.util as i; sys.exit(i.find_spec("tensorflow") is not None)' || \
		$(PYTHON) $(ENVIRONMENT) $(VENV) $(PINNED) --no-deps tf_keras
	@# uv does not compile what it installs. Without these imports the first tests would compile it, several at a time.
	@printf '%s\n' 'tensorflow, keras, tf_keras' 'lightning, torchmetrics, skopt, mxnet' | \
		xargs -P 2 -I {} $(BIN)/python -c 'import {}' >/dev/null 2>&1 || true
	@$(BIN)/python -c 'import sys; sys.version_info < (3, 13) or print("MXNet is left out: it needs numpy 1.26, which has no wheel for this Python")'
	@touch $@

.venv-demo/.made: pyproject.toml constraints.txt plugins/ddl_shm/pyproject.toml plugins/ddl_torch/pyproject.toml
	$(NEED_PYTHON)
	@echo "creating .venv-demo with $$($(PYTHON) --version): ddlcore, ddl-shm, ddl-torch, $(TORCH), scikit-learn"
	$(PYTHON) $(ENVIRONMENT) .venv-demo $(PINNED) $(TORCH) -e . -e plugins/ddl_shm -e plugins/ddl_torch scikit-learn
	@touch $@

demo: $(DEMO)/.made
	@PATH="$(CURDIR)/$(DEMO)/bin:$$PATH" python tools/demo.py

# Four at a time, also on two cores: a test with processes often waits. What measures times has the machine for itself.
# TESTS are further arguments, such as: make test TESTS="tests/control --max-unstable 0"
test: venv
	$(BIN)/python tools/run_tests.py $(TESTS)

test-long: venv
	$(BIN)/python tools/run_tests.py --tier long $(TESTS)

# It needs nothing but a Python: each cell has an environment of its own, with packages of PyPI only. CELLS are the names of
# some cells, of which `tools/run_matrix.py --list` prints all.
test-matrix:
	$(NEED_PYTHON)
	$(PYTHON) tools/run_matrix.py $(CELLS)

# One test after the other: each loads the machine as much as it can. Pytest ends with 5 where no test has the mark.
soak: venv
	$(BIN)/pytest -m soak

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/pytest tests/architecture --quiet

# The variable turns off an advertisement for the theme's successor. With --quiet, warnings would not end the build.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "the site is built: open $(CURDIR)/build/site/index.html, or run $(BIN)/mkdocs serve, which has the search"

bench: venv
	$(BIN)/python tools/bench_collectives.py
	$(BIN)/python tools/bench_training.py
	$(BIN)/python tools/bench_startup.py

release-check: venv
	$(BIN)/python tools/release_check.py

clean:
	rm -rf .venv .venv-demo build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
