# The service, `--target service`, and what the nightly proof runs in, `--target spark` (the service as well).
# `--target demo` plays order 1030.
# BASE is any Debian 12, by whatever name your registry has it.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS python
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates python3 \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 halfnote \
 && useradd --uid 10001 --gid halfnote --home-dir /var/lib/halfnote --create-home --shell /usr/sbin/nologin halfnote

FROM python AS build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/halfnote
ENV PATH=/opt/halfnote/bin:$PATH
WORKDIR /source

FROM build AS build-service
COPY requirements-image.lock ./
RUN pip install --no-cache-dir --require-hashes -r requirements-image.lock
COPY pyproject.toml README.md LICENSE ./
COPY app app
COPY migrations migrations
COPY spark spark
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

FROM build AS build-spark
COPY requirements-spark.lock ./
RUN pip install --no-cache-dir --require-hashes -r requirements-spark.lock
COPY pyproject.toml README.md LICENSE ./
COPY app app
COPY migrations migrations
COPY spark spark
# Paths that do not name Python's version: what spark-submit runs, and Spark's own.
RUN pip install --no-cache-dir --no-deps --no-build-isolation . \
 && packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
 && mkdir "$packages/pyspark/conf" \
 && ln -s "$packages/spark" /opt/halfnote/spark \
 && ln -s "$packages/pyspark" /opt/halfnote/pyspark

FROM ${BASE} AS jars
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends maven openjdk-17-jre-headless \
 && rm -rf /var/lib/apt/lists/*
# Postgres's driver, and what else Spark needs, as `group:artifact:version …`, each with what it brings:
# JARS=org.apache.hadoop:hadoop-aws:3.5.0 is S3, 690 MB of it.
ARG JDBC=org.postgresql:postgresql:42.7.7
ARG JARS=
COPY images/fetch-jars /usr/local/bin/fetch-jars
# hadolint ignore=SC2086
RUN fetch-jars /jars/driver $JDBC && fetch-jars /jars/more $JARS

FROM python AS spark
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends openjdk-17-jre-headless procps \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build-spark /opt/halfnote /opt/halfnote
COPY --from=jars /jars/driver /opt/halfnote/jars
COPY --from=jars /jars/more /opt/halfnote/jars/more
COPY images/spark-entrypoint images/nightly /opt/halfnote/bin/
# Where Spark on Kubernetes looks for it; where every JVM of Spark, driver or executor, finds jars, whoever starts it; and
# what volumes are laid over, so that they are ours.
RUN ln -s /opt/halfnote/pyspark /opt/spark \
 && find /opt/halfnote/jars/more -name '*.jar' -exec ln -s '{}' /opt/spark/jars/ ';' \
 && install --directory --owner=10001 --group=10001 /archive /staging
# Matplotlib and Java keep files where HOME is; in a container whose root cannot be written that is /tmp.
ENV PATH=/opt/halfnote/bin:$PATH \
    SPARK_HOME=/opt/spark \
    PYSPARK_PYTHON=/opt/halfnote/bin/python \
    PYTHONUNBUFFERED=1 \
    HALFNOTE_JDBC_JAR=/opt/halfnote/jars/postgresql-42.7.7.jar \
    MPLCONFIGDIR=/tmp/matplotlib \
    HOME=/tmp
USER 10001:10001
WORKDIR /tmp
HEALTHCHECK NONE
ENTRYPOINT ["/opt/halfnote/bin/spark-entrypoint"]
CMD ["reconcile"]

FROM python AS service
COPY --from=build-service /opt/halfnote /opt/halfnote
COPY images/healthcheck /opt/halfnote/bin/healthcheck
# Where a volume may be laid over, so that it is ours.
RUN install --directory --owner=10001 --group=10001 /keys
ENV PATH=/opt/halfnote/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HALFNOTE_DATA_DIR=/var/lib/halfnote/data
USER 10001:10001
WORKDIR /var/lib/halfnote
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=6 CMD ["/opt/halfnote/bin/healthcheck"]
ENTRYPOINT ["/opt/halfnote/bin/halfnote"]
CMD ["serve"]

FROM service AS demo
WORKDIR /opt/demo
COPY demo demo
HEALTHCHECK NONE
ENTRYPOINT ["/opt/halfnote/bin/python", "-m", "demo"]
CMD []

# What is built unless a target is named.
FROM service
