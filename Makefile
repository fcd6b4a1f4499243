# make demo   the two-minute tour (arguments: make demo ARGS="--only right")
# make test   the tests, the linter and the type checker
# Both set up .venv by themselves the first time. PYTHON=python3.12 chooses another interpreter.

PYTHON ?= python3

.PHONY: demo test mutants clean

demo: .venv/ready-plot
	.venv/bin/ringtile demo $(ARGS)

test: .venv/ready-dev
	.venv/bin/python -m pytest -q $(ARGS)

mutants: .venv/ready-dev
	.venv/bin/python scripts/mutants.py $(ARGS)

.venv/ready-%: pyproject.toml constraints.txt scripts/environment.py
	$(PYTHON) scripts/environment.py $*
	@touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
