# Everything runs in .venv, made on first use. Variables:
#   TORCH      what to install before the rest, for example TORCH=torch==2.13.0 (default: what pip resolves)
#   ARGS       passed on to the command, for example ARGS="--dtype float32"
#   QUESTIONS  the questions of `make bench`: JSON lines in Spec-Bench's form
PYTHON ?= python3
TORCH ?=
BIN := .venv/bin

.PHONY: demo test test-oldest lint bench clean

demo: .venv/.demo
	$(BIN)/hf-specdec demo $(ARGS)

test: .venv/.dev
	$(BIN)/python -m pytest -n auto $(ARGS)

# The oldest supported Transformers, in an environment that borrows everything else from the first. What has little to
# do with Transformers is left out.
HOSTLESS := accept checkpoints data documents golden_heads published_heads growing heads history prompt_lookup publishing recipes report_page schedule stats \
	structure training translation
test-oldest: .venv-oldest/.ready
	.venv-oldest/bin/python -m pytest -n auto $(HOSTLESS:%=--ignore=tests/test_%.py) $(ARGS)

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.demo
	@test -n "$(QUESTIONS)" || { echo "Say which questions: make bench QUESTIONS=FILE"; exit 2; }
	$(BIN)/hf-specdec bench --questions "$(QUESTIONS)" $(ARGS)

clean:
	rm -rf .venv .venv-oldest

$(BIN)/python:
	$(PYTHON) -m venv .venv

# .venv/.demo and .venv/.dev: installed with that extra; made again when the requirements change.
.venv/.%: pyproject.toml | $(BIN)/python
	$(if $(TORCH),$(BIN)/pip install "$(TORCH)")
	$(BIN)/pip install --editable ".[$*]"
	@touch $@

.venv-oldest/.ready: .venv/.dev
	$(PYTHON) -m venv --without-pip .venv-oldest
	borrowed=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	own=$$(.venv-oldest/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	echo "import site; site.addsitedir('$$borrowed')" > "$$own/borrowed.pth"
	.venv-oldest/bin/python -m pip install "transformers==5.17.0"
	@touch $@
