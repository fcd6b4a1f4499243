# make demo   the two-minute tour (arguments: make demo ARGS="--only right")
# make test   the tests, the linter and the type checker
# make docs   the documentation, into site/
# Each sets up .venv by itself the first time. PYTHON=python3.12 chooses another interpreter.

PYTHON ?= python3

.PHONY: demo test docs mutants clean

demo: .venv/ready-plot
	.venv/bin/ringtile demo $(ARGS)

test: .venv/ready-dev
	.venv/bin/python -m pytest -q $(ARGS)

docs: .venv/ready-dev
	.venv/bin/python scripts/benchmark_page.py
	.venv/bin/python scripts/promises.py
	.venv/bin/python -m mkdocs build --strict $(ARGS)

mutants: .venv/ready-dev
	.venv/bin/python scripts/mutants.py $(ARGS)

.venv/ready-%: pyproject.toml constraints.txt scripts/environment.py
	$(PYTHON) scripts/environment.py $*
	@touch $@

clean:
	rm -rf .venv site .pytest_cache .mypy_cache .ruff_cache .hypothesis
