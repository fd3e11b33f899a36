# Every target sets up what it needs. Inside an active conda environment, or with PYTHON=/path/to/python,
# that interpreter is used and nothing is installed.
#   VARIANT  all, or rungs separated by commas          CASE   suites and cases separated by commas
#   CHUNKS   the chunks that a trace shows, such as 16:20
#   SET      what ncu collects: full, speed, stalls or roofline
#   RUN      the folder of a run, to report or diff; two with a comma to compare in a report
#   OUT      a new folder for what is measured
.DEFAULT_GOAL := help
.PHONY: help env test test-gpu lint compile bench peers ncu nsys trace record notebooks report diff clean
.DELETE_ON_ERROR:

VARIANT ?= all
SUITE ?= lab
RUN ?= profiling/recorded/h200
with_out = $(if $(OUT),--out $(OUT))
with_case = $(if $(CASE),--case $(CASE))
with_chunks = $(if $(CHUNKS),--chunks $(CHUNKS))
comma := ,
chosen = $(if $(filter all,$(VARIANT)),last,$(VARIANT))
traced = $(if $(and $(A),$(B)),$(A)$(comma)$(B),$(or $(A),$(B),$(chosen)))

ifdef CONDA_PREFIX
PYTHON ?= python
endif
ifdef PYTHON
py := $(PYTHON)
else
py := .venv/bin/python
everything := .venv/everything.stamp
reporting := .venv/reporting.stamp
comparing := .venv/comparing.stamp
endif

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(everything) ## install everything for kernels, tests and notebooks into .venv

report: $(reporting) ## PDF, tables, figures of RUN (the recorded H200 run) into build/report; RUN=a,b compares two
	$(py) -m analysis.report --run $(RUN) --out build/report

diff: $(reporting) ## what moved from rung A to B (the last two) on CASE=wide_gva_state, by Nsight's counters, in words
	$(py) -m analysis.diff $(if $(A),--a $(A)) $(if $(B),--b $(B)) $(with_case) --run $(RUN)

notebooks: $(reporting) ## execute the notebooks on RUN into build/notebooks
	$(py) -m analysis.notebooks --run $(RUN) --out build/notebooks

test: $(everything) ## the tests that need no GPU; kernels are cross-compiled for sm_90a
	$(py) -m pytest -m "not gpu" -n auto --maxprocesses 8 --dist loadfile

test-gpu: $(everything) ## every variant on every lab case and on odd shapes, on this machine's GPU
	$(py) -m pytest -m gpu tests/test_gpu.py tests/test_bench.py

lint: $(everything) ## ruff: rules and formatting
	$(py) -m ruff check .
	$(py) -m ruff format --check .

compile: $(everything) ## compile VARIANT for CASE into TileLang's cache; print registers, spills, SASS facts
	$(py) -m variants --variant $(VARIANT) $(with_case)

bench: $(everything) ## check and time VARIANT=all on CASE=lab with both clocks
	$(py) -m profiling.bench --variant $(VARIANT) $(with_case) $(with_out)

peers: $(comparing) ## the last rung beside FlashQLA, FLA and FlashInfer, by phase, on SUITE=lab (or qwen, varlen)
	$(py) -m profiling.bench --peers --variant $(chosen) --case $(SUITE) $(with_out)

ncu: $(everything) ## Nsight Compute on VARIANT=all, CASE=wide_gva_state: report, CSV, a table
	$(py) -m profiling.ncu --variant $(VARIANT) $(with_case) $(if $(SET),--set $(SET)) $(with_out)

nsys: $(everything) ## Nsight Systems on VARIANT=all, CASE=lab: report, sqlite, time per NVTX range
	$(py) -m profiling.nsys --variant $(VARIANT) $(with_case) $(with_out)

trace: $(everything) ## inside the kernel: a timeline of every role of VARIANT (the last), or of A and B, on CASE=wide_gva_state
	out=$(or $(OUT),results/$$(date -u +%Y%m%dT%H%M%SZ)-trace) && \
	$(py) -m profiling.trace --variant $(traced) $(with_case) $(with_chunks) --out $$out && \
	$(py) -m analysis.trace --run $$out $(with_chunks) --out $$out/trace

record: $(if $(filter ncu nsys trace rows,$(PART)),$(everything),$(comparing)) ## bench, peers, cold start, ncu, nsys, trace into profiling/recorded/<gpu> or OUT; PART=bench|cold|ncu|nsys|trace|rows: one
	$(py) -m profiling.record $(if $(PART),--part $(PART)) $(if $(REPLACE),--replace) $(with_out)

clean: ## remove .venv, build and caches; results and recorded runs stay
	rm -rf .venv build .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	python3 -m venv .venv
	$@ -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25"

.venv/reporting.stamp: pyproject.toml requirements.lock | .venv/bin/python
	$(py) -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[notebooks]'
	@touch $@

.venv/everything.stamp: pyproject.toml requirements.lock | .venv/bin/python
	$(py) -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[gpu,notebooks,reports,dev]'
	@touch $@ .venv/reporting.stamp

# The libraries are gigabytes and of no use without a GPU, so that is asked for first.
.venv/comparing.stamp: .venv/everything.stamp
	@$(py) -c "from kernels.errors import command; from profiling import run; command(run.require_gpu)()"
	$(py) -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[peers]'
	@touch $@
