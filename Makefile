.PHONY: bench check docs format gpu lint lowest lowest-lock notebooks release slow test try-release

check: test slow lint    ## everything that must pass before a commit

test:               ## the default tests, on all cores; what depends on it, on both kinds of CPU
	python -m pytest -n auto --auto-precision fp32
	python -m pytest -n auto --auto-precision bf16 -m "auto_precision and not slow"

slow:               ## the tests that take longer, on all cores
	python -m pytest -n auto --auto-precision fp32 -m slow -o faulthandler_timeout=900

lint:               ## lint, format and types
	ruff check .
	ruff format --check .
	mypy

bench:              ## this toolkit beside its peers, one file in benchmarks/results (pip install -e . --group bench)
	python -m benchmarks

gpu:                ## every test that needs a GPU, then the network beside timm there, in one file
	python -m benchmarks --gpu --compile --memory

format:             ## mend what ruff can mend
	ruff check --fix .
	ruff format .

release:            ## sdist and wheel in dist/, built twice and compared (pip install --group release)
	python packaging/build_release.py

try-release:        ## the wheel of dist/ alone, by the lines of the pages, and the tests of the sdist (pip install '.[test]')
	python -m tools.try_release

lowest:             ## the default tests with the lower bounds of all libraries, in a virtual environment of their own
	python -m venv --clear .venv-lowest
	.venv-lowest/bin/pip install --quiet -r packaging/lowest.txt
	.venv-lowest/bin/pip install --quiet --no-deps -e .
	.venv-lowest/bin/python -m pytest -n auto --auto-precision fp32

lowest-lock:        ## packaging/lowest.txt again, after a change of the lower bounds in pyproject.toml
	uv pip compile --quiet --upgrade --python-version 3.11 --resolution lowest-direct --extra test --no-emit-package vit-toolkit \
		--custom-compile-command "make lowest-lock" pyproject.toml --output-file packaging/lowest.txt

notebooks:          ## what the notebooks of docs/notebooks print, executed and saved again (pip install '.[dev]')
	python tools/execute_notebooks.py

docs:               ## the documentation site in site/, which needs no server (pip install -e . --group docs)
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict
