# make demo   the three-minute tour (arguments: make demo ARGS="--only right")
# make test   the tests, the linter and the type checker
# make test-all  those marked slow, too
# make quick  a few tests, between two changes
# make drift  the models of transformers with one thing of it changed at a time: right, or refused in one line
# make fuzz   calls of every kind against the oracle (SECONDS=600 SEED=0)
# make docs   the documentation, into site/
# make wheels the wheels of every platform, into dist/, checked, and tried as far as they run here
# make release all of them and the source distribution, with the checks of a release; it publishes nothing
# Each sets up .venv by itself the first time. PYTHON=python3.12 chooses another interpreter.
#
# With cmake and a C++ compiler alone:
# make native     the native kernel, into src/ringtile/lib/
# make sanitize   its driver under AddressSanitizer and UndefinedBehaviorSanitizer, every instruction set (CASES=1000,
#                 OPENMP=libomp.so for threads of another OpenMP runtime)
# make valgrind   its driver under valgrind, which runs AVX2 at most

PYTHON ?= python3
MAKEFLAGS += --no-print-directory

CASES ?= 192
SECONDS ?= 600
SEED ?= 0
OPENMP ?= libgomp.so.1
QUICK = $(patsubst %,tests/%.py,project/test_architecture functional/test_errors patterns/test_grammar \
  patterns/test_density kernels/test_select kernels/test_philox)
# The bits of a release, which fuses products and sums.
SANITIZE = -O1 -fexpensive-optimizations -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all

.PHONY: demo test test-all quick docs drift mutants wheels release native sanitize valgrind clean
.NOTPARALLEL:

demo: .venv/ready-demo .venv/ready-native
	.venv/bin/python -m demo --out .venv/demo $(ARGS)

test: .venv/ready-dev .venv/ready-native
	.venv/bin/python -m pytest -q --numprocesses=auto --dist=loadgroup $(ARGS)

test-all:
	$(MAKE) test ARGS='-m "slow or not slow" $(ARGS)'

quick: .venv/ready-dev .venv/ready-native
	.venv/bin/python -m pytest -q --numprocesses=auto $(QUICK) $(ARGS)

docs: .venv/ready-dev
	.venv/bin/python scripts/benchmark_page.py
	.venv/bin/python scripts/promises.py
	.venv/bin/python scripts/hand_written.py
	.venv/bin/python -m mkdocs build --strict $(ARGS)

drift: .venv/ready-dev .venv/ready-native
	.venv/bin/python scripts/drift.py $(ARGS)
	.venv/bin/python scripts/drift_torch.py

fuzz: .venv/ready-dev .venv/ready-native
	.venv/bin/python scripts/fuzz.py --seconds $(SECONDS) --seed $(SEED) $(ARGS)

mutants: .venv/ready-dev .venv/ready-native
	.venv/bin/python scripts/mutants.py $(ARGS)

wheels: .venv/ready-dev
	.venv/bin/python scripts/wheels.py

release: .venv/ready-dev .venv/ready-native
	.venv/bin/python scripts/release.py

native:
	cmake -S . -B .venv/native -DRINGTILE_EMULATE_AMX=ON
	cmake --build .venv/native --parallel

sanitize:
	cmake -S . -B .venv/sanitize -DCMAKE_BUILD_TYPE=None -DCMAKE_C_FLAGS="$(SANITIZE)" -DCMAKE_CXX_FLAGS="$(SANITIZE)"
	cmake --build .venv/sanitize --parallel --target driver
	RINGTILE_OPENMP=$(OPENMP) .venv/sanitize/driver $(CASES)

valgrind:
	cmake -S . -B .venv/native -DRINGTILE_EMULATE_AMX=ON
	cmake --build .venv/native --parallel --target driver
	valgrind --quiet --error-exitcode=1 --leak-check=full \
	  --show-leak-kinds=definite --errors-for-leak-kinds=definite .venv/native/driver $(CASES)

.venv/ready-native: scripts/environment.py CMakeLists.txt $(wildcard native/*)
	$(PYTHON) scripts/environment.py native
	@touch $@

.venv/ready-%: pyproject.toml constraints.txt scripts/environment.py compat/pyproject.toml
	$(PYTHON) scripts/environment.py $*
	@touch $@

clean:
	rm -rf .venv build dist site
