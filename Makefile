# make demo    see one-shot merging beat FedAvg on real data
# make federation   the same over a SuperLink and SuperNodes with data of their own
# make test    everything that a change must pass
# make oldest  the tests with the lowest versions that pyproject.toml admits
# make fuzz    a hundred thousand spoiled uploads: each is read, or refused by name
# make smoke   every benchmark in its smallest size, in CI once a release
# make results  the pages that put the papers' figures and ours side by side
# make reference  the reference and the drawing of rooms, from the code
# make docs    these, the tutorials that have changed, and a site: build/docs/index.html
# make dist    a wheel and an sdist in dist/, looked over by twine
# make release those and the apps as bundles for Flower Hub, all checked (RELEASING.md)
# make gpu     on a machine with one: its tables, and the tests that touch it (6 minutes)
# make develop an editable environment
# Everything happens in .venv, with PYTHON (3.11 or newer) as its base; without one,
# demo and federation make .venv-demo, which holds what they need and no more.

PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export FLWR_TELEMETRY_ENABLED ?= 0

.PHONY: demo federation test types units oldest fuzz smoke results reference docs dist release gpu develop install install-demo clean

# The wheel, so that what is tested is what is shipped.
wheel = rm -rf build/lib build/bdist.* *.egg-info && \
	$(1)/bin/pip install -q --no-deps --force-reinstall .

DEMO := $(if $(wildcard .venv/dependencies),.venv,.venv-demo)

# A home and ports of its own: SuperLinks that share a home share their runs.
FREE_PORT := python -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])"

demo: install-demo
	@rm -rf outputs/demo build/flwr && mkdir -p outputs/demo build/flwr
	@echo "Five clients train on scikit-learn's digits, with a few labels each. A server"
	@echo "merges their models by FedFisher, and compares this with FedAvg: one to two minutes."
	@export PATH="$(CURDIR)/$(DEMO)/bin:$$PATH"; \
	export RAY_DEDUP_LOGS=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0; \
	export FLWR_HOME="$(CURDIR)/build/flwr"; \
	export FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=$$($(FREE_PORT)); \
	export FLWR_LOCAL_CONTROL_API_PORT=$$($(FREE_PORT)); \
	flwr run apps/fedfisher --stream \
		--federation-config "num-supernodes=5 client-resources-num-cpus=1" \
		--run-config "output-dir='$(CURDIR)/outputs/demo'"; \
	pkill -f "flower-superlink .*127.0.0.1:$$FLWR_LOCAL_CONTROL_API_PORT" || true
	@test -f outputs/demo/metrics.json || { echo "The run failed; see above."; exit 1; }

# The nodes run from an environment of their own, without extras.
APP ?= fedfisher
federation: install-demo .venv-node/dependencies
	@rm -rf outputs/federation
	@$(call wheel,.venv-node)
	$(DEMO)/bin/python federation/demo.py outputs/federation --app apps/$(APP) \
		--nodes-bin .venv-node/bin

.venv-node/dependencies: pyproject.toml
	@tools/environment.sh .venv-node $(PYTHON) .

# Types are checked beside the tests, which leave a core idle now and then.
test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) -j 2 types units

# A checkout has the package in two places.
types:
	@rm -rf build/types/flwr_fisher && mkdir -p build/types
	@cp -R flwr_fisher build/types && cp -R strategies build/types/flwr_fisher
	cd build/types && MYPYPATH=.$$(printf ':%s' ../../apps/*) \
		../../$(BIN)/mypy --config-file ../../pyproject.toml \
		$(foreach package,flwr_fisher $(notdir $(wildcard apps/*)),-p $(package))

# Tensors are small: threads would only wait, and files are shared among processes, in
# their order: those of the fewest tests are the longest.
units:
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

# The wheel again, in an environment of its own.
oldest: .venv-oldest/dependencies
	@$(call wheel,.venv-oldest)
	OMP_NUM_THREADS=1 .venv-oldest/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder \
		--ignore tests/test_docs.py

# uv finds the lowest, of what is named in pyproject.toml; the newest of all else. Not the
# docs', whose transformers wants a newer safetensors than the library. Warnings are errors
# in tests, also those of other packages' code as it is compiled: it is, here.
.venv-oldest/dependencies: pyproject.toml
	$(PYTHON) -m venv --clear .venv-oldest
	.venv-oldest/bin/pip install -q uv
	.venv-oldest/bin/uv pip install -q --python .venv-oldest/bin/python --compile-bytecode \
		--resolution lowest-direct -r pyproject.toml --extra all --extra test
	@touch $@

fuzz: install
	$(BIN)/python tools/fuzz_wire.py --count 100000 --seed 0

smoke: install
	$(BIN)/python benchmarks/smoke.py

results: install
	$(BIN)/python benchmarks/summary.py

reference: install
	$(BIN)/python tools/reference.py

# Tutorials run two at a time: their tensors are small.
docs: reference
	OMP_NUM_THREADS=1 $(BIN)/python tools/tutorial_pages.py
	$(BIN)/sphinx-build -j 2 -b html -W --keep-going -q docs build/docs

# In an environment of its own: twine wants a newer packaging than Flower.
dist:
	rm -rf dist build/release
	$(PYTHON) -m venv build/release
	build/release/bin/pip install -q build twine
	build/release/bin/python -m build -q
	build/release/bin/twine check --strict dist/*

# Flower's own checks, and whether the apps' dependencies resolve once an index has the
# wheel. Bundles have a folder of their own: all of dist/ goes to the index.
release: dist install
	rm -rf build/fabs
	$(BIN)/python release/build_fabs.py build/fabs --dist dist

# Nothing is installed: .venv's packages are used, or PYTHON's where there is no .venv.
# What differs from the pretended accelerator needs PyTorch and torchvision alone. Sized for
# six minutes on an H200: gpu.py begins nothing new after 4.5; its --only measures the rest.
GPU_PYTHON = $(firstword $(wildcard $(BIN)/python) $(PYTHON))
gpu: export PYTHONPATH := $(CURDIR)
gpu:
	$(GPU_PYTHON) benchmarks/accelerator.py --device cuda
	$(GPU_PYTHON) benchmarks/gpu.py --minutes 4.5
	@$(GPU_PYTHON) -c "import flwr, hypothesis, matplotlib, pytest" || { \
		echo "Without these, the tests are left out."; exit 1; }
	$(GPU_PYTHON) -m pytest tests/test_devices.py tests/test_client.py \
		tests/test_merge_pcg.py tests/test_curvature_algebra.py

install: .venv/dependencies
	@$(call wheel,.venv)

install-demo: $(DEMO)/dependencies
	@$(call wheel,$(DEMO))

develop: .venv/dependencies
	$(BIN)/pip install -q --no-deps -e .

.venv/dependencies: pyproject.toml
	@tools/environment.sh .venv $(PYTHON) ".[dev]"

# To compile all of PyTorch takes longer than the demo; Ray's workers would compile what
# they import each for itself.
DEMO_MODULES := torch flwr.cli.app,flwr.simulation,ray sklearn.datasets,flwr_datasets \
	flwr_fisher.report,flwr_fisher.client,matplotlib.pyplot

.venv-demo/dependencies: pyproject.toml
	@tools/environment.sh .venv-demo $(PYTHON) --no-compile ".[simulation,demo,report,secure]"
	@for modules in $(DEMO_MODULES); do echo "Compiling $$modules"; \
		PYTHONDONTWRITEBYTECODE= .venv-demo/bin/python -W ignore -c "import $$modules"; done

clean:
	rm -rf .venv .venv-demo .venv-node .venv-oldest build dist outputs *.egg-info
