.PHONY: bench check format gpu lint slow test

check: test slow lint    ## everything that must pass before a commit

test:               ## the default tests, on all cores; what depends on it, on both kinds of CPU
	python -m pytest -n auto --auto-precision fp32
	python -m pytest -n auto --auto-precision bf16 -m "auto_precision and not slow"

slow:               ## the tests that take longer, on all cores
	python -m pytest -n auto --auto-precision fp32 -m slow

lint:               ## lint, format and types
	ruff check .
	ruff format --check .
	mypy

bench:              ## this toolkit beside its peers, one file in benchmarks/results (pip install '.[bench]')
	python -m benchmarks

gpu:                ## every test that needs a GPU, then the network beside timm there, in one file
	python -m benchmarks --gpu --compile --memory

format:             ## mend what ruff can mend
	ruff check --fix .
	ruff format .
