"""The settings of the service: every option with its unit and default."""

import ipaddress
import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, FilePath, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.database.url_file import FILE, FORM, checked_url
from app.field_rules import RATE_LEAST_PER_S
from app.permissions import Role, is_key

# Ports that checks and webhooks must not reach even at allowed addresses: logins, mail, files, databases, clusters.
DENIED_PORTS = (
    *(20, 21, 22, 23, 25, 53, 110, 111, 135, 137, 138, 139, 143, 389, 445, 465, 514, 587, 636, 873, 993, 995),
    *(1433, 1521, 2049, 2181, 2375, 2376, 2379, 2380, 3306, 3389, 5432, 5900, 6379, 6443, 9042, 9200, 9300),
    *(10250, 10255, 11211, 27017),
)
LOOPBACK = ("127.0.0.0/8", "::1/128")

ProcessRole = Literal["all", "api", "worker"]
Accept = Literal["all", "ends"]
Auth = Literal["off", "keys"]
Topics = Literal["open", "declared"]
MOST_WORKERS = 64
# Beyond what one process can have. A number without a limit would overflow somewhere, long after the start.
MOST_REQUESTS = 1_000_000
MOST_MEMORY_BYTES = 1024**4
LARGEST_DISK_BYTES = 1024**5
# A statement of a flush carries whole bodies, and Postgres takes at most 1 GiB in one.
LARGEST_BODY_BYTES = 256 * 1024 * 1024
# No wait and no interval is longer: a day.
LONGEST_WAIT_S = 86_400
# 100 years. Times that are much longer have no date from which or to which they can be counted.
LONGEST_KEPT_S = 36_500 * 86_400
# A day is removed by force HALFNOTE_MAX_RETENTION_S after its end, and a delayed message is due HALFNOTE_DELAY_LIMIT_S
# after its commit. Its id may be older than the half by HALFNOTE_ID_SKEW_S. Another day is left for the verdict and the
# delivery.
DECIDED_WITHIN_S = 86_400
ID_SKEW_S = 300
MAX_RETENTION_S, RETENTION_S, DELAY_LIMIT_S = 45 * 86_400, 7 * 86_400, 40 * 86_400
# The roles of people.
PersonRole = Literal[Role.VIEWER, Role.OPERATOR, Role.ADMIN]


# Variables of the commands, the nightly programs and the client, which may have the same environment.
OTHER_VARIABLES = (
    *(
        "URL",
        "API_KEY",
        "CA_FILE",
        "BASE_URL",
        "SPARK_CONF",
        "SPARK_NICE",
        "JDBC_JAR",
        "LEDGER_DATABASE",
        "LEDGER_PASSWORD",
        "DATABASE_URLS",
        "CERTIFICATE_KEY",
        "CERTIFICATE_COMMAND",
        "CERTIFICATE_PUBLIC_KEY",
        "SCREENSHOTS",
    ),
    "KUBE_DIR",
    # `halfnote serve` sets them for its own processes.
    "WORKER_STATE_FILE",
    "EMBEDDED_POSTGRES_HOME",
)
# The tests' own, the chart's for the URLs of further databases, and what Kubernetes sets in a namespace with a Service
# named `halfnote`.
IGNORED = re.compile(r"TEST_.*|DATABASE_URL_OF_\d+|(.*_)?SERVICE_(HOST|PORT.*)|(.*_)?PORT_\d+_(TCP|UDP).*")

KEY_FORM = (
    "must be `hn_` and 43 to 128 letters or digits with 256 random bits: for example `hn_` and `openssl rand -hex 32`"
)


class BadAdminKeyFile(Exception):
    """The file of the admin key is unusable; the message says why."""


class BadOidcSecretFile(Exception):
    """The file of the client secret of OpenID Connect is unusable; the message says why."""


class Settings(BaseSettings):
    """Options, read from the environment as `HALFNOTE_<NAME>` when the service starts (never at import)."""

    # Errors do not repeat inputs: a URL may hold a password.
    model_config = SettingsConfigDict(
        env_prefix="HALFNOTE_", extra="ignore", frozen=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    database_url: str | None = Field(
        None,
        description="URL of your own Postgres (15 or newer, UTF8), `postgresql://…`; empty: the embedded Postgres",
    )
    database_url_file: Path | None = Field(
        None,
        description="file that contains that URL, for example a mounted Secret; it is read at each new connection, so "
        "that a changed password needs no restart",
    )
    data_dir: Path = Field(Path(".halfnote"), description="directory of the embedded Postgres")
    host: str = Field("127.0.0.1", description="address to listen on; with auth off only a loopback address")
    port: int = Field(8080, ge=1, le=65535, description="port to listen on")
    tls_cert: Path | None = Field(
        None,
        description="PEM file of the service's own certificate, followed by its chain: `halfnote serve` then speaks "
        "TLS, 1.2 or newer, and no plain HTTP (docs/operations/tls.md)",
    )
    tls_key: Path | None = Field(None, description="PEM file of the key of HALFNOTE_TLS_CERT, without a passphrase")
    tls_reload_s: float = Field(
        10.0,
        gt=0,
        le=LONGEST_WAIT_S,
        description="how often HALFNOTE_TLS_CERT and HALFNOTE_TLS_KEY are read; new connections use what changed",
    )
    auth: Auth = Field(
        "off",
        validate_default=True,
        description="`keys`: every call except probes needs an API key (docs/keys.md); `off`: every caller on this "
        "machine may do everything",
    )
    admin_key: SecretStr | None = Field(
        None,
        description="the first admin key, which the database does not store: `hn_` and 43 to 128 letters or digits",
    )
    admin_key_file: Path | None = Field(None, description="file that contains such a key, for example a mounted Secret")
    public_url: str | None = Field(
        None,
        description="address at which people open the console, such as https://halfnote.example.com; with OpenID "
        "Connect the issuer sends people back to `/console/sign-in/openid/callback` of it",
    )
    oidc_issuer: str | None = Field(
        None,
        description="URL of the issuer of OpenID Connect whose people may sign in to the console (docs/sign-in.md); "
        "empty: only API keys. Needs halfnote-server[oidc] and `HALFNOTE_AUTH=keys`",
    )
    oidc_client_id: str | None = Field(None, description="id of the client that the issuer has for this service")
    oidc_client_secret: SecretStr | None = Field(
        None, description="secret of that client; not set: a public client, with PKCE alone"
    )
    oidc_client_secret_file: Path | None = Field(
        None, description="file that contains this secret, for example a mounted Secret; it is read at each sign-in"
    )
    oidc_scopes: Annotated[tuple[str, ...], NoDecode] = Field(
        ("openid", "profile", "email"), description="scopes that the service asks for, comma-separated"
    )
    oidc_role_claim: str = Field(
        "groups",
        min_length=1,
        description="claim whose values give a person's role; a name, or a path with dots such as `realm_access.roles`",
    )
    oidc_roles: Annotated[dict[str, PersonRole], NoDecode] = Field(
        {},
        description="role of each value of that claim: `oncall=operator,staff=viewer`, or a JSON object; the roles are "
        "`viewer`, `operator` and `admin`, and of several a person gets the one that may do most",
    )
    oidc_bodies: Annotated[tuple[str, ...] | None, NoDecode] = Field(
        None,
        description="values of that claim whose operators and viewers see bodies, comma-separated or a JSON array; not "
        "set: all operators and no viewers. Admins always see bodies",
    )
    oidc_name_claim: str = Field(
        "email", min_length=1, description="claim that names a person in the console and in the audit; without it `sub`"
    )
    oidc_label: str | None = Field(
        None, max_length=60, description="name of the issuer on the button **Sign in with …**; empty: its host"
    )
    oidc_timeout_s: float = Field(10.0, gt=0, le=60, description="time limit of each call to the issuer")
    topics: Topics = Field(
        "open",
        description="`open`: messages may name any topic; `declared`: only topics declared by `PUT /topics/{name}`",
    )
    role: ProcessRole = Field("all", description="`api` runs no loops; `worker` runs the loops and also answers probes")
    workers: Literal["auto"] | int = Field(
        "auto",
        description="processes of one `halfnote serve`. `1`: one process. 2 to 64: so many API processes and, with "
        "role `all`, one worker process beside them. `auto`: one of each with role `all` and two cores or more, "
        "otherwise one process",
    )
    accept: Accept = Field("all", description="`ends` refuses new halves; ends, checks and deliveries continue")
    allow_networks: Annotated[tuple[str, ...] | None, NoDecode] = Field(
        None,
        description="denied networks that checks, webhooks and brokers may dial, comma-separated (docs/security.md); "
        "not set: loopback with the embedded Postgres, otherwise none",
    )
    deny_networks: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="more denied networks, unless HALFNOTE_ALLOW_NETWORKS allows them, comma-separated"
    )
    deny_ports: Annotated[tuple[Annotated[int, Field(ge=1, le=65535)], ...], NoDecode] = Field(
        DENIED_PORTS,
        description="ports that checks, webhooks and brokers must not use, comma-separated; a broker may use the usual "
        "port of its kind",
    )
    https_only: bool = Field(False, description="check URLs and webhooks must be https://, and brokers must use TLS")
    tls_ca_file: FilePath | None = Field(
        None, description="PEM file of CAs to trust for receivers and brokers, in addition to those of the system"
    )
    tls_cert_file: FilePath | None = Field(
        None, description="PEM file of the client certificate for receivers and brokers, with its chain"
    )
    tls_key_file: FilePath | None = Field(
        None, description="PEM file of that certificate's key; empty: the key is in HALFNOTE_TLS_CERT_FILE"
    )
    proxy_url: SecretStr | None = Field(
        None,
        description="HTTP proxy for check URLs and webhooks, http://[user:password@]host:port; the proxy then resolves "
        "host names; HTTP_PROXY and similar variables are never used",
    )
    secrets_key_file: Path | None = Field(
        None,
        description="file of the keys that seal secrets in the database (docs/security.md); required with your own "
        "Postgres; with the embedded Postgres the default is a file in the data directory, made at the first start",
    )
    origin: str = Field(
        "halfnote",
        max_length=253,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?$",
        description="name of this service when it asks a webhook for consent, in the form of a DNS name",
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        ("127.0.0.1", "localhost", "::1"),
        description="accepted `Host` names, comma-separated; with `HALFNOTE_AUTH=keys` the default is all names",
    )

    key_rate_per_s: float | None = Field(
        None,
        ge=RATE_LEAST_PER_S,
        le=1_000_000,
        description="most requests per second of a key in each process, unless the key has its own limit; above it 429",
    )
    key_in_flight_max: int | None = Field(
        None, ge=1, le=MOST_REQUESTS, description="most requests of one key in flight in each process; above it 429"
    )
    request_timeout_s: float = Field(
        30.0,
        gt=0,
        le=LONGEST_WAIT_S,
        description="time limit for a whole request to arrive, and for a caller to read a response",
    )
    head_limit_bytes: int = Field(
        64 * 1024,
        ge=8192,
        le=1024 * 1024,
        description="the largest first line and headers of a request together; above it 431",
    )
    refusal_read_s: float = Field(
        2.0,
        gt=0,
        le=60,
        description="how long a client whose request was refused before its end may read the answer; then the "
        "connection is closed",
    )
    keep_alive_s: int = Field(
        75,
        ge=1,
        le=3600,
        description="how long a connection stays open between requests; longer than the idle timeout of clients and "
        "load balancers, so that they close first and no request is lost",
    )
    connections_max: int = Field(
        10_000,
        ge=16,
        le=MOST_REQUESTS,
        description="most open connections of each process; above it the connections that have been idle longest "
        "are closed",
    )
    in_flight_max: int = Field(
        10_000,
        ge=1,
        le=MOST_REQUESTS,
        description="most requests in flight in each process, except probes and metrics; above it 503",
    )
    event_streams_max: int = Field(
        200,
        ge=1,
        le=MOST_REQUESTS,
        description="most open streams of `GET /events` in each process; above it 503 with Retry-After",
    )
    bodies_max_bytes: int = Field(
        64 * 1024 * 1024,
        ge=1024,
        le=MOST_MEMORY_BYTES,
        description="most bytes of all request bodies in flight in each process; above it 503 with Retry-After",
    )
    pool_size: int = Field(
        8,
        ge=2,
        le=1000,
        description="database connections of each process, besides those that commit halves and ends; requests leave "
        "three of them to the loops and to /readyz",
    )
    pool_timeout_s: float = Field(
        10.0,
        gt=0,
        le=LONGEST_WAIT_S,
        description="how long a request or a loop waits for one of them; after it 503 with Retry-After",
    )
    timeline_look_s: float = Field(
        5.0,
        gt=0,
        le=LONGEST_WAIT_S,
        description="how often a process looks for a promoted server, if HALFNOTE_DATABASE_URL names several hosts",
    )
    timeline_look_timeout_s: float = Field(
        2.0,
        gt=0,
        le=LONGEST_WAIT_S,
        description="time limit of such a look at one host; a host that does not answer is left out",
    )
    clock_skew_max_s: float = Field(
        5.0,
        gt=0,
        le=LONGEST_WAIT_S,
        description="the largest difference between the clocks of a process and of the database; above it `/readyz` "
        "fails",
    )
    batch_max: int = Field(500, ge=1, le=500, description="most requests in one flush")
    queue_max: int = Field(
        10_000,
        ge=1,
        le=MOST_REQUESTS,
        description="most requests that wait for a flush; above it 503 with Retry-After",
    )
    linger_s: float = Field(
        0.001,
        ge=0,
        le=0.1,
        description="how long a flush waits at most while requests keep coming, if the flush before it had several",
    )
    flush_timeout_s: float = Field(
        10.0,
        gt=0,
        le=LONGEST_WAIT_S,
        description="time limit of a flush; after it the answer is the error `outcome-unknown`",
    )

    recent_halves_bytes: int = Field(
        16 * 1024 * 1024,
        ge=0,
        le=MOST_MEMORY_BYTES,
        description="memory for halves without an end, whose messages then go to the relay of the same machine without "
        "being read from the database; 0 reads each message",
    )

    body_limit_bytes: int = Field(
        4 * 1024 * 1024,
        ge=1024,
        le=LARGEST_BODY_BYTES,
        description="the largest request body of a transaction",
    )
    context_limit_bytes: int = Field(
        4096, ge=0, le=LARGEST_BODY_BYTES, description="the largest `context` of a half, as JSON"
    )
    headers_limit_bytes: int = Field(
        8192,
        ge=0,
        le=1024 * 1024,
        description="the largest `headers` of one message, names and values together",
    )
    id_skew_s: int = Field(
        ID_SKEW_S,
        ge=1,
        le=LONGEST_WAIT_S,
        description="the largest difference between a new transaction_id's time and the coordinator's",
    )
    max_retention_s: int = Field(
        MAX_RETENTION_S,
        ge=3600,
        le=LONGEST_KEPT_S,
        description="age at which a day is removed even if something still holds it",
    )
    retention_s: int = Field(
        default_factory=lambda given: min(RETENTION_S, _longest(given)),
        ge=3600,
        le=LONGEST_KEPT_S,
        description="how long a settled day is kept; at most HALFNOTE_MAX_RETENTION_S, which lowers the default",
    )
    delay_limit_s: int = Field(
        default_factory=lambda given: max(
            0, min(DELAY_LIMIT_S, _longest(given) - _delay_margin_s(given.get("id_skew_s", ID_SKEW_S)))
        ),
        ge=0,
        le=LONGEST_KEPT_S,
        description="the largest deliver_after_s; 0, or at least a day and HALFNOTE_ID_SKEW_S less than "
        "HALFNOTE_MAX_RETENTION_S, which lowers the default",
    )
    archive: str | None = Field(
        None,
        description="directory or URL (any Hadoop filesystem) of the archive; if it is set, a day is removed only "
        "after it is archived; empty: no archive",
    )
    archive_bodies: bool = Field(
        True, description="`true`: the archive holds the bodies of messages; `false`: only their digests"
    )
    archive_keep_s: int | None = Field(
        None,
        ge=86_400,
        le=LONGEST_KEPT_S,
        description="how long the archive keeps a day after the end of the day; empty: forever",
    )
    days_ahead: int = Field(7, ge=1, le=60, description="for how many days after today partitions are made")
    claim_max: int = Field(
        1000, ge=1, le=10_000, description="the most messages of one claim of a consumer; below 10 also the default"
    )
    claim_held_max_s: int = Field(
        12 * 3600,
        ge=1,
        le=12 * 3600,
        description="the longest time for which a consumer may hold a message; below 30 also the default of a claim",
    )
    claim_connections: int = Field(
        8, ge=1, le=100, description="database connections of a process for consumers that claim, opened when needed"
    )
    drain_s: float = Field(
        8.0, gt=0, le=LONGEST_WAIT_S, description="how long a process that received SIGTERM waits for work in flight"
    )
    otlp_endpoint: str | None = Field(
        None,
        description="URL of the collector that receives spans by OTLP over HTTP, such as http://collector:4318; empty: "
        "no spans. Needs halfnote-server[otel]; OTEL_… variables set everything else",
    )
    trace_ratio: float = Field(
        0.01, ge=0, le=1, description="share of requests without a trace context that are traced"
    )
    attempts_page_max: int = Field(
        1000,
        ge=1,
        le=1000,
        description="most attempts, and most redeliveries, of a transaction or a dead letter in one answer; "
        "`GET /transactions/{id}/attempts` pages through earlier attempts",
    )
    metrics_values_max: int = Field(
        200,
        ge=1,
        le=10_000,
        description="most producer groups, topics, keys and subscriptions, each, that the metrics count by; all "
        "further ones count as `(other)` (docs/metrics.md)",
    )
    report_dir: Path | None = Field(
        None,
        description="directory that `halfnote reconcile --out` writes to, so that the console can show its report; "
        "empty: `reconciliation` in HALFNOTE_DATA_DIR",
    )
    audit_keep_s: int = Field(400 * 86_400, ge=86_400, le=LONGEST_KEPT_S, description="how long audit rows are kept")
    database_disk_bytes: int | None = Field(
        None,
        ge=1,
        le=LARGEST_DISK_BYTES,
        description="bytes that your own Postgres has for this database without its WAL, for the metric of the hours "
        "until its disk is full; not set: the free space of the data directory with the embedded Postgres, otherwise "
        "not known",
    )
    lag_refresh_s: float = Field(
        5.0,
        gt=0,
        le=LONGEST_WAIT_S,
        description="how often a worker reads the end of the log for the lag metrics, while its deliveries do not keep "
        "up; otherwise it reads it at each turn",
    )
    check_concurrency: int = Field(
        64, ge=1, le=10_000, description="most checks in flight in one worker, over all producer groups"
    )

    @field_validator("workers", mode="before")
    @classmethod
    def _auto_or_number(cls, value: object) -> object:
        if value == "auto":
            return value
        if not str(value).isdecimal() or not 1 <= int(str(value)) <= MOST_WORKERS:
            raise ValueError(f"must be `auto`, or a number from 1 to {MOST_WORKERS}")
        return int(str(value))

    @field_validator(
        "allow_networks", "deny_networks", "deny_ports", "allowed_hosts", "oidc_scopes", "oidc_bodies", mode="before"
    )
    @classmethod
    def _split(cls, value: object, info: ValidationInfo) -> object:
        if info.field_name == "oidc_bodies" and isinstance(value, str) and value.lstrip().startswith("["):
            return _json(value)
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("oidc_roles", mode="before")
    @classmethod
    def _pairs(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        if value.lstrip().startswith("{"):
            return _json(value)
        pairs = [part.strip().rpartition("=") for part in value.split(",") if part.strip()]
        if not all(name and role for name, _, role in pairs):
            raise ValueError("must be `value=role,value=role` or a JSON object")
        return {name.strip(): role.strip() for name, _, role in pairs}

    @field_validator(
        "archive",
        "archive_keep_s",
        "public_url",
        "oidc_issuer",
        "oidc_client_id",
        "oidc_client_secret",
        "oidc_client_secret_file",
        "oidc_bodies",
        "oidc_label",
        "otlp_endpoint",
        "tls_ca_file",
        "tls_cert",
        "tls_key",
        "tls_cert_file",
        "tls_key_file",
        "proxy_url",
        "secrets_key_file",
        mode="before",
    )
    @classmethod
    def _empty_is_none(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("auth")
    @classmethod
    def _off_on_loopback_alone(cls, value: Auth, info: ValidationInfo) -> Auth:
        host = info.data.get("host", "localhost")
        if value == "off" and host != "localhost" and not _is_loopback(host):
            raise ValueError(
                f"auth is off, and {host} can be reached from other machines. Set HALFNOTE_AUTH=keys (the first key: "
                "`halfnote keys create --role admin`, or HALFNOTE_ADMIN_KEY_FILE), or listen on 127.0.0.1 or ::1."
            )
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _exportable(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("must be a URL like http://collector:4318")
        return value

    @model_validator(mode="before")
    @classmethod
    def _url_of_file(cls, values: dict[str, object]) -> dict[str, object]:
        """Let `database_url` name the file: connections read it."""
        file, given = values.get("database_url_file"), values.get("database_url")
        if not file:
            return {**values, "database_url_file": None}
        address = f"{FILE}{Path(str(file)).absolute()}"
        if given and given != address:
            raise ValueError("set HALFNOTE_DATABASE_URL or HALFNOTE_DATABASE_URL_FILE, not both")
        return {**values, "database_url": address}

    @field_validator("database_url")
    @classmethod
    def _postgres(cls, value: str | None) -> str | None:
        if not value or value.startswith(FILE):
            return value
        url = checked_url(value)
        if url is None:
            raise ValueError(f"must be a URL like {FORM}")
        return url

    @field_validator("admin_key_file", mode="before")
    @classmethod
    def _no_file(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("admin_key", mode="before")
    @classmethod
    def _key_form(cls, value: object) -> object:
        if value == "" or value is None:
            return None
        text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
        if not is_key(text):
            # The error leaves out the value: it may be most of a key.
            raise ValueError(KEY_FORM)
        return SecretStr(text)

    def given_admin_key(self) -> str | None:
        """Return the admin key that the database does not store, or None. Raises BadAdminKeyFile."""
        if self.admin_key is not None:
            return self.admin_key.get_secret_value()
        if self.admin_key_file is None:
            return None
        try:
            text = self.admin_key_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BadAdminKeyFile(f"HALFNOTE_ADMIN_KEY_FILE cannot be read: {error}") from None
        if not is_key(text):
            raise BadAdminKeyFile(f"The key in HALFNOTE_ADMIN_KEY_FILE {KEY_FORM}")
        return text

    @field_validator("public_url", "oidc_issuer")
    @classmethod
    def _address_of_people(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        is_plain = parts.scheme == "http" and (parts.hostname == "localhost" or _is_loopback(parts.hostname or ""))
        if not parts.hostname or parts.username or parts.query or parts.fragment:
            raise ValueError("must be a URL like https://people.example.com, without user, query and fragment")
        if parts.scheme != "https" and not is_plain:
            raise ValueError("must begin with https://; http:// is only for this machine")
        if info.field_name == "public_url":
            if parts.path not in ("", "/"):
                raise ValueError("must have no path: the console is at /console")
            # The case of a scheme has no meaning. `urlsplit` returns it in lower case.
            return (parts.scheme + value[len(parts.scheme) :]).rstrip("/")
        return value

    @model_validator(mode="after")
    def _sign_in(self) -> Self:
        if self.oidc_issuer is None:
            return self
        missing = [
            f"HALFNOTE_{name.upper()}"
            for name in ("oidc_client_id", "oidc_roles", "public_url")
            if not getattr(self, name)
        ]
        if missing:
            raise ValueError(f"HALFNOTE_OIDC_ISSUER needs {', '.join(missing)}")
        if self.auth == "off":
            raise ValueError("HALFNOTE_OIDC_ISSUER needs HALFNOTE_AUTH=keys: with auth off no one signs in")
        if "openid" not in self.oidc_scopes:
            raise ValueError("HALFNOTE_OIDC_SCOPES must have `openid`")
        if self.oidc_client_secret is not None and self.oidc_client_secret_file is not None:
            raise ValueError("set HALFNOTE_OIDC_CLIENT_SECRET or HALFNOTE_OIDC_CLIENT_SECRET_FILE, not both")
        return self

    def given_oidc_secret(self) -> str | None:
        """Return the client secret of OpenID Connect, or None for a public client. Raises BadOidcSecretFile."""
        if self.oidc_client_secret is not None:
            return self.oidc_client_secret.get_secret_value()
        if self.oidc_client_secret_file is None:
            return None
        try:
            text = self.oidc_client_secret_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BadOidcSecretFile(f"HALFNOTE_OIDC_CLIENT_SECRET_FILE cannot be read: {error}") from None
        if not text:
            raise BadOidcSecretFile("HALFNOTE_OIDC_CLIENT_SECRET_FILE is empty")
        return text

    @field_validator("allow_networks", "deny_networks")
    @classmethod
    def _networks(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for network in value or ():
            ipaddress.ip_network(network)
        return value

    @field_validator("proxy_url")
    @classmethod
    def _proxy(cls, value: SecretStr | None) -> SecretStr | None:
        parts = urlsplit(value.get_secret_value()) if value is not None else None
        if parts is not None and (parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/")):
            raise ValueError("must be http://[user:password@]host:port")
        return value

    @model_validator(mode="after")
    def _certificate(self) -> Self:
        if self.tls_key_file is not None and self.tls_cert_file is None:
            raise ValueError("HALFNOTE_TLS_KEY_FILE needs HALFNOTE_TLS_CERT_FILE")
        return self

    @model_validator(mode="after")
    def _own_certificate(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "HALFNOTE_TLS_KEY" if self.tls_key is None else "HALFNOTE_TLS_CERT"
            raise ValueError(
                f"to speak TLS, the service needs HALFNOTE_TLS_CERT and HALFNOTE_TLS_KEY; {missing} is not set. "
                "The client certificate for receivers and brokers is HALFNOTE_TLS_CERT_FILE"
            )
        return self

    @model_validator(mode="after")
    def _one_body_fits(self) -> Self:
        if self.bodies_max_bytes < self.body_limit_bytes:
            raise ValueError("HALFNOTE_BODIES_MAX_BYTES must be at least HALFNOTE_BODY_LIMIT_BYTES")
        return self

    @model_validator(mode="after")
    def _retention(self) -> Self:
        if self.retention_s > self.max_retention_s:
            raise ValueError(
                f"HALFNOTE_RETENTION_S ({self.retention_s}) is more than HALFNOTE_MAX_RETENTION_S "
                f"({self.max_retention_s}), at which every day is removed: lower the first or raise the second"
            )
        margin_s = _delay_margin_s(self.id_skew_s)
        if self.delay_limit_s and self.delay_limit_s + margin_s > self.max_retention_s:
            raise ValueError(
                f"HALFNOTE_DELAY_LIMIT_S ({self.delay_limit_s}) is not {margin_s} (a day and HALFNOTE_ID_SKEW_S) less "
                f"than HALFNOTE_MAX_RETENTION_S ({self.max_retention_s}): the day of a delayed message could be "
                "removed before it is due. Lower the first (0 allows no delays) or raise the second"
            )
        return self

    @property
    def opened_networks(self) -> tuple[str, ...]:
        """The denied networks in which checks, webhooks and brokers are allowed."""
        if self.allow_networks is None:
            return LOOPBACK if self.embedded else ()
        return self.allow_networks

    @property
    def key_file(self) -> Path | None:
        """The key file of secrets at rest; None if the database is the user's own and no file is set."""
        if self.secrets_key_file is None and self.embedded:
            return self.data_dir / "secrets.keys"
        return self.secrets_key_file

    @property
    def embedded(self) -> bool:
        """Whether this service runs its own Postgres."""
        return not self.database_url


def _longest(given: Mapping[str, Any]) -> int:
    """Return the longest retention among the settings that were read; it is missing if it is not valid."""
    return int(given.get("max_retention_s", MAX_RETENTION_S))


def _delay_margin_s(id_skew_s: int) -> int:
    return id_skew_s + DECIDED_WITHIN_S


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables `HALFNOTE_…` that nothing reads, each with the nearest name of a setting, if one is near."""
    prefix = "HALFNOTE_"
    settings = [name.upper() for name in Settings.model_fields]
    names = [name.removeprefix(prefix) for name in sorted(environment) if name.startswith(prefix)]
    unknown = [name for name in names if name not in (*settings, *OTHER_VARIABLES) and not IGNORED.fullmatch(name)]
    # Compared without the prefix, which alone would make any two names similar.
    nearest = {name: get_close_matches(name, settings, n=1) for name in unknown}
    return {prefix + name: prefix + found[0] if found else None for name, found in nearest.items()}


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError("is not valid JSON") from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
