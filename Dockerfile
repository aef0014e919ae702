# `--target service` builds the service, `--target spark` the nightly proof (which also contains the service),
# `--target demo` the demo of order 1030.
# BASE is an image of Debian 12, by its name in your registry.
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
# The links give spark-submit's files and Spark itself paths that do not contain Python's version.
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
# JDBC is Postgres's driver. JARS lists further jars for Spark as `group:artifact:version …`; each is fetched with its
# dependencies. JARS=org.apache.hadoop:hadoop-aws:3.5.0 adds S3 (690 MB).
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
# Spark on Kubernetes expects Spark in /opt/spark. Its jars directory is on the classpath of every JVM, driver and
# executor. /archive and /staging are mount points; they are made here so that their volumes belong to our user.
RUN ln -s /opt/halfnote/pyspark /opt/spark \
 && find /opt/halfnote/jars/more -name '*.jar' -exec ln -s '{}' /opt/spark/jars/ ';' \
 && install --directory --owner=10001 --group=10001 /archive /staging
# Matplotlib and Java write files to HOME, which must be /tmp in a container with a read-only root.
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
# /keys is a mount point; it is made here so that its volume belongs to our user.
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

# The default target.
FROM service
