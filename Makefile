# One command each, on a fresh Debian or Ubuntu with Python 3.11 or later. Everything they make is in .venv, .tox, build
# and the user's cache (the default model); `make clean` removes all but the last.
PYTHON ?= python3
TOX := .venv/bin/tox
ENGINE := $(TOX) exec -q -e engine --

.PHONY: help demo test check cov bench qualify clean

help:
	@echo "make demo      serve the default model on two ranks, restore its prefixes, print the table"
	@echo "make test      tests of every package"
	@echo "make check     format, lint, types, import contracts, rules of the repository"
	@echo "make cov       branch coverage of protocol and record modules"
	@echo "make bench     the benchmarks"
	@echo "make qualify   real groups under injected faults, and the simulator: build/qualification/report.html"
	@echo "make clean     remove what these commands made in this directory"

demo: .tox/engine.stamp
	$(ENGINE) python -m flare_qualify.demo

test: .tox/light.stamp .tox/engine.stamp
	$(TOX) run -m test

check: .tox/light.stamp .tox/engine.stamp
	@status=0; $(TOX) run -e check || status=1; $(ENGINE) mypy || status=1; exit $$status

cov: .tox/light.stamp
	$(TOX) run -e cov

bench: .tox/engine.stamp
	$(ENGINE) python -m flare_qualify.bench

qualify: .tox/engine.stamp
	$(TOX) run -e qualify

clean:
	rm -rf .venv .tox build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage

# tox itself notices a changed tox.ini, but not that a package changed what it depends on.
DECLARED := constraints.txt $(wildcard packages/*/pyproject.toml) qualify/pyproject.toml

.tox/engine.stamp: $(TOX) $(DECLARED)
	$(TOX) run -e engine --notest $(if $(wildcard $@),--recreate)
	touch $@

.tox/light.stamp: $(TOX) $(DECLARED)
	$(TOX) run -e check,transport,core,cache,spec,cli-light,cov --notest $(if $(wildcard $@),--recreate)
	touch $@

$(TOX): constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is too old: flare needs Python 3.11 or later (make PYTHON=python3.12 ...)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "$(PYTHON) cannot make virtual environments: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q -c constraints.txt tox
	touch $@
