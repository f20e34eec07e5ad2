.PHONY: check test lint format slow

check: test lint    ## everything that must pass before a commit

test:               ## the default tests, on all cores
	python -m pytest -n auto

slow:               ## the tests that take longer
	python -m pytest -m slow

lint:               ## lint, format and types
	ruff check .
	ruff format --check .
	mypy

format:             ## mend what ruff can mend
	ruff check --fix .
	ruff format .
