# `make run` and `make test` need only Python 3.11 or newer: each installs its dependencies in .venv.

VENV ?= .venv
BIN := $(VENV)/bin
PYTHONS := $(if $(PYTHON),$(PYTHON),python3 python3.13 python3.12 python3.11)
# An installation is repeated only after its lock file changed.
MADE := $(VENV)/.made
RUN := $(VENV)/.run-$(shell cat requirements.lock pyproject.toml | cksum | cut -d ' ' -f 1)
SPARK := $(VENV)/.spark-$(shell cat requirements-spark.lock pyproject.toml | cksum | cut -d ' ' -f 1)
DEV := $(VENV)/.dev-$(shell cat requirements-dev.lock pyproject.toml | cksum | cut -d ' ' -f 1)
# Where `make install` puts the command, and its virtual environment.
PREFIX ?= $(HOME)/.local
INSTALLED := $(PREFIX)/share/halfnote
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# The tests share one Postgres. Tests that wait leave two cores to two more processes.
# The tests of the proof run in one of them (tests/support/xdist_scheduling.py), so that there is one Spark session.
PYTEST := $(BIN)/python -m pytest -n 4 --dist loadgroup
# The quick runs do not use Schemathesis, whose plugin takes seconds to import in each process.
QUICK := $(PYTEST) -p no:schemathesis
# With this variable set, every process that a test starts would compile the sources again.
test test-fast test-all: export PYTHONDONTWRITEBYTECODE :=
test-all: export HALFNOTE_TEST_EXAMPLES := all

.DEFAULT_GOAL := help
.PHONY: help screenshots run install demo demo-compare reconcile test test-all test-fast test-deps test-helm test-image helm-deps sbom audit
.PHONY: check bucket-deps test-bucket format bench bench-relay bench-scale bench-spark bench-console bench-pull bench-peers docs lock clean

help: ## list these commands
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*##/\t/' | expand -t 14

run: $(RUN) ## run Halfnote on 127.0.0.1:8080 with an embedded Postgres
	@$(BIN)/halfnote serve

install: $(MADE) ## install the command `halfnote` for this user as PREFIX/bin/halfnote; PREFIX is ~/.local
	@echo "Installing halfnote into $(INSTALLED) (a minute)"
	@$(BIN)/python -m venv "$(INSTALLED)"
	@"$(INSTALLED)/bin/python" -m pip --disable-pip-version-check install --quiet --require-hashes -r requirements.lock
	@"$(INSTALLED)/bin/python" -m pip --disable-pip-version-check install --quiet --force-reinstall --no-deps \
	  --no-build-isolation .
	@mkdir -p "$(PREFIX)/bin" && ln -sf "$(INSTALLED)/bin/halfnote" "$(PREFIX)/bin/halfnote"
	@echo "Installed $(PREFIX)/bin/halfnote $$("$(PREFIX)/bin/halfnote" --version)"
	@case ":$$PATH:" in *":$(PREFIX)/bin:"*) ;; *) echo "Put $(PREFIX)/bin on your PATH." ;; esac

demo: $(RUN) ## run order 1030 with a real producer and receiver, and an order whose producer dies before the end
	@$(BIN)/python -m demo

demo-compare: $(RUN) ## compare four ways to announce orders while processes are killed: lost, invented, processed twice
	@PYTHONPATH=sdk $(BIN)/python -m examples.order_1030

reconcile: $(SPARK) ## run the nightly proof over the embedded database now and print the report's address; needs Java 17
	@$(BIN)/halfnote reconcile --out $${HALFNOTE_DATA_DIR:-.halfnote}/reconciliation

test: $(DEV) ## run the tests on a real Postgres, real brokers and Spark, in 5 to 9 minutes
	$(QUICK) -m "not slow"

test-fast: $(DEV) ## run the tests without brokers, Spark, whole services and the client, in a minute and a half
	$(QUICK) -m "not slow and not broker and not spark and not full"

test-all: $(DEV) ## run every test, with all examples of property tests
	$(PYTEST)

test-deps: ## install servers and a browser for tests: RabbitMQ, NATS, Redis, MariaDB, pgbouncer, Chromium (apt), Kafka (Maven); without them, their tests are skipped
	@scripts/test-deps

helm-deps: ## build what the chart's tests need, with Go: Helm, a Kubernetes API and more; the first time takes half an hour
	@scripts/helm-deps

screenshots: $(DEV) ## write the pictures of docs/console.md; needs Debian's chromium
	HALFNOTE_TEST_DEPS=required HALFNOTE_SCREENSHOTS=docs/console $(PYTEST) tests/console -k pictures

# A missing program is an error in these three commands. In other commands it skips tests (tests/support/requirements.py).
test-helm: $(DEV) ## test the chart and the compose file on a real Kubernetes API; needs `make helm-deps`, root and podman
	HALFNOTE_TEST_HELM=required $(PYTEST) tests/helm

test-image: $(DEV) ## build and run the images and the compose file with podman, order 1030 and its proof included; needs root
	HALFNOTE_TEST_IMAGES=required $(PYTEST) tests/system/test_images.py tests/system/test_compose.py

bucket-deps: ## install what `make test-bucket` needs: MinIO (Go) and Spark's jars for S3 (Maven); 1 GB, ten minutes
	@scripts/bucket-deps

test-bucket: $(DEV) ## test archive and proof with a bucket on a real S3 server; needs `make bucket-deps`
	HALFNOTE_TEST_BUCKET=required $(PYTEST) tests/spark/test_bucket.py

sbom: ## write the images' contents, read from the lock files and the Dockerfile, into dist/ as CycloneDX
	@PYTHONWARNINGS=ignore scripts/sbom .tools/sbom

audit: $(DEV) ## list known vulnerabilities of the packages in the images' lock files; needs access to the advisory data
	@[ -x .tools/audit/bin/pip-audit ] || { $(BIN)/python -m venv .tools/audit && \
	  .tools/audit/bin/pip --disable-pip-version-check install --quiet pip-audit==2.10.1; }
	@$(BIN)/python -m scripts.audit .tools/audit/bin/pip-audit

check: $(DEV) ## check format, lint rules, types, the direction of imports, and the language and links of all texts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file sdk/pyproject.toml
	$(BIN)/lint-imports
	PYTHONPATH=sdk $(BIN)/lint-imports --config sdk/pyproject.toml
	$(BIN)/python -m pytest -q -p no:schemathesis -p no:cacheprovider tests/project/test_language.py \
	  tests/project/test_readme.py -m "not slow"

format: $(DEV) ## format the sources and fix lint errors
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(DEV) ## measure the request figures of docs/benchmarks.md; QUICK=1 takes under a minute
	$(BIN)/python -m bench

bench-relay: $(DEV) ## measure the relay's figures, a quarter of an hour; QUICK=1 takes under two minutes
	$(BIN)/python -m bench relay

bench-scale: $(DEV) ## measure what more cores give, on a machine that has them; QUICK=1 takes under a minute
	$(BIN)/python -m bench scale

bench-spark: $(DEV) ## measure the proof's figures; QUICK=1 takes a few minutes
	$(BIN)/python -m bench spark

bench-console: $(DEV) ## measure the pages of the console over 5,000,000 transactions; QUICK=1 takes under a minute
	$(BIN)/python -m bench console

bench-pull: $(DEV) ## measure consumers that claim, several minutes; QUICK=1 takes under a minute
	$(BIN)/python -m bench pull

bench-peers: $(DEV) ## measure Halfnote beside RocketMQ and DTM; QUICK=1 takes a few minutes
	$(BIN)/python -m bench peers

docs: $(DEV) ## write the pages and the chart's schema that are generated from the code
	$(BIN)/python -m scripts.config_docs
	$(BIN)/python -m scripts.limits_docs
	$(BIN)/python -m scripts.chart_settings
	$(BIN)/python -m scripts.client_reference
	$(BIN)/python scripts/errors_page > docs/errors.md

lock: ## write the lock files from pyproject.toml; needs uv
	scripts/lock

clean: ## delete everything that was made, except .halfnote, which holds messages
	rm -rf $(VENV) .tools dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis bench/out
	rm -rf examples/node/node_modules
	find . -name __pycache__ -prune -exec rm -rf {} +

$(MADE):
	@for python in $(PYTHONS); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "Making $(VENV) with $$("$$python" --version)"; \
	    "$$python" -m venv $(VENV) && touch $@ && exit 0; \
	    echo "Python could not make a virtual environment (on Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; \
	  fi; \
	done; \
	echo "Halfnote needs Python 3.11 or newer; tried: $(PYTHONS). Set the path: make PYTHON=/path/to/python3" >&2; exit 1

$(RUN): $(MADE)
	@echo "Installing requirements.lock (a minute, the first time)"
	@$(PIP) --require-hashes -r requirements.lock
	@$(PIP) --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.run-*; touch $@

$(SPARK): $(MADE)
	@echo "Installing requirements-spark.lock (PySpark is 400 MB; some minutes, the first time)"
	@$(PIP) --require-hashes -r requirements-spark.lock
	@$(PIP) --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.spark-*; touch $@

$(DEV): $(MADE)
	@echo "Installing requirements-dev.lock (a minute, the first time)"
	@$(PIP) --require-hashes -r requirements-dev.lock
	@$(PIP) --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.dev-*; touch $@
