# `make run` and `make test` need Python 3.11 or newer and nothing else: each makes what it needs in .venv.

VENV ?= .venv
BIN := $(VENV)/bin
PYTHONS := $(if $(PYTHON),$(PYTHON),python3 python3.13 python3.12 python3.11)
# An installation is repeated only when its lock changed.
MADE := $(VENV)/.made
RUN := $(VENV)/.run-$(shell cat requirements.lock pyproject.toml | cksum | cut -d ' ' -f 1)
SPARK := $(VENV)/.spark-$(shell cat requirements-spark.lock pyproject.toml | cksum | cut -d ' ' -f 1)
DEV := $(VENV)/.dev-$(shell cat requirements-dev.lock pyproject.toml | cksum | cut -d ' ' -f 1)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# The tests share one Postgres; more than two at once gain nothing on small machines.
# Those of the proof run in one of them (tests/scheduling.py), so that there is one Spark session.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help run demo demo-compare reconcile test test-all test-deps test-helm test-image helm-deps sbom audit check
.PHONY: bucket-deps test-bucket format bench bench-relay bench-spark docs lock clean

help: ## these lines
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*##/\t/' | expand -t 14

run: $(RUN) ## Halfnote on 127.0.0.1:8080, with a Postgres of its own
	@$(BIN)/halfnote serve

demo: $(RUN) ## order 1030 with a real producer and receiver, and a producer that dies and is rescued
	@$(BIN)/python -m demo

demo-compare: $(RUN) ## orders announced in four ways, by a shop that dies at every step: what is lost, invented, done twice
	@PYTHONPATH=sdk $(BIN)/python -m examples.order_1030

reconcile: $(SPARK) ## the nightly proof over the embedded database, now; needs Java 17
	@$(BIN)/halfnote reconcile

test: $(DEV) ## the tests, but for those that take minutes
	$(PYTEST) -m "not slow"

test-all: $(DEV) ## every test
	$(PYTEST)

test-deps: ## the servers that tests need: RabbitMQ, NATS, Redis, MariaDB, pgbouncer by apt, Kafka by Maven; else their tests are skipped
	@scripts/test-deps

helm-deps: ## what the chart is tested with: Helm, a Kubernetes API and more, built by Go; half an hour, the first time
	@scripts/helm-deps

# What these need and do not find is an error there, and skips tests elsewhere (tests/absent.py).
test-helm: $(DEV) ## the chart and the compose file, on a real Kubernetes API; after `make helm-deps`; needs root and podman
	HALFNOTE_TEST_HELM=required $(PYTEST) tests/helm

test-image: $(DEV) ## images and compose file, built and run by podman, with order 1030 and its proof; needs root
	HALFNOTE_TEST_IMAGES=required $(PYTEST) tests/test_images.py tests/test_compose.py

bucket-deps: ## what `make test-bucket` needs: MinIO, by Go, and Spark's jars for S3, by Maven; a gigabyte, ten minutes
	@scripts/bucket-deps

test-bucket: $(DEV) ## archive and proof in a bucket of a real S3 server; after `make bucket-deps`
	HALFNOTE_TEST_BUCKET=required $(PYTEST) tests/spark/test_bucket.py

sbom: ## what locks and Dockerfile say that the images are made of, as CycloneDX, into dist/
	@PYTHONWARNINGS=ignore scripts/sbom .tools/sbom

audit: $(DEV) ## known vulnerabilities of what the images' locks name, where the advisory data can be reached
	@[ -x .tools/audit/bin/pip-audit ] || { $(BIN)/python -m venv .tools/audit && \
	  .tools/audit/bin/pip --disable-pip-version-check install --quiet pip-audit==2.10.1; }
	@$(BIN)/python -m scripts.audit .tools/audit/bin/pip-audit

check: $(DEV) ## format, lint, types, direction of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file sdk/pyproject.toml
	$(BIN)/lint-imports
	PYTHONPATH=sdk $(BIN)/lint-imports --config sdk/pyproject.toml

format: $(DEV) ## put the sources in form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(DEV) ## what the README's figures come from; QUICK=1 takes under a minute
	$(BIN)/python -m bench

bench-relay: $(DEV) ## the relay's figures, a quarter of an hour; QUICK=1 takes under two minutes
	$(BIN)/python -m bench relay

bench-spark: $(DEV) ## the proof's figures; QUICK=1 takes a few minutes
	$(BIN)/python -m bench spark

docs: $(DEV) ## the pages that are made from the code
	$(BIN)/python -m scripts.config_docs
	$(BIN)/python -m scripts.chart_settings
	$(BIN)/python scripts/errors_page > docs/errors.md

lock: ## the locks anew from pyproject.toml; needs uv
	scripts/lock

clean: ## everything that was made, but not .halfnote, which holds messages
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
	echo "Halfnote needs Python 3.11 or newer; tried: $(PYTHONS). Name yours: make PYTHON=/path/to/python3" >&2; exit 1

$(RUN): $(MADE)
	@echo "Installing what requirements.lock names (a minute, the first time)"
	@$(PIP) --require-hashes -r requirements.lock
	@$(PIP) --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.run-*; touch $@

$(SPARK): $(MADE)
	@echo "Installing what requirements-spark.lock names (PySpark is 400 MB; some minutes, the first time)"
	@$(PIP) --require-hashes -r requirements-spark.lock
	@$(PIP) --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.spark-*; touch $@

$(DEV): $(MADE)
	@echo "Installing what requirements-dev.lock names (a minute, the first time)"
	@$(PIP) --require-hashes -r requirements-dev.lock
	@$(PIP) --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.dev-*; touch $@
