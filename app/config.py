"""Every option of the service, named once, with its unit and default."""

import ipaddress
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, FilePath, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.access import is_key

# What a POST to an address that is allowed should not reach: logins, mail, files, databases, cluster interiors.
DENIED_PORTS = (
    *(20, 21, 22, 23, 25, 53, 110, 111, 135, 137, 138, 139, 143, 389, 445, 465, 514, 587, 636, 873, 993, 995),
    *(1433, 1521, 2049, 2181, 2375, 2376, 2379, 2380, 3306, 3389, 5432, 5900, 6379, 6443, 9042, 9200, 9300),
    *(10250, 10255, 11211, 27017),
)
LOOPBACK = ("127.0.0.0/8", "::1/128")

Role = Literal["all", "api", "worker"]
Accept = Literal["all", "ends"]
Auth = Literal["off", "keys"]
Topics = Literal["open", "declared"]


KEY_FORM = (
    "must be `hn_` and 43 to 128 letters or digits, of 256 random bits: for example `hn_` and `openssl rand -hex 32`"
)


class BadKeyFile(Exception):
    """The file with the admin's key is of no use; the text says why."""


class Settings(BaseSettings):
    """Options, read from the environment as `HALFNOTE_<NAME>` when the service starts (never at import)."""

    # Inputs are not repeated in errors: a URL may hold a password.
    model_config = SettingsConfigDict(env_prefix="HALFNOTE_", extra="ignore", frozen=True, hide_input_in_errors=True)

    database_url: str | None = Field(None, description="the user's own Postgres (15+, UTF8); empty: the embedded one")
    data_dir: Path = Field(Path(".halfnote"), description="where the embedded Postgres keeps its files")
    host: str = Field("127.0.0.1", description="address to listen on; with auth off only a loopback one")
    port: int = Field(8080, ge=1, le=65535, description="port to listen on")
    auth: Auth = Field(
        "off",
        validate_default=True,
        description="`keys`: every call but those of probes needs an API key (docs/keys.md); `off`: whoever reaches "
        "the port on this machine may do everything",
    )
    admin_key: SecretStr | None = Field(
        None, description="an admin's key that is in no database, to begin with: `hn_` and 43 to 128 letters or digits"
    )
    admin_key_file: Path | None = Field(None, description="a file that holds such a key, as mounted Secrets do")
    topics: Topics = Field(
        "open", description="`declared`: messages of topics that were not declared by `PUT /topics/{name}` are refused"
    )
    role: Role = Field("all", description="`api` runs no loops; `worker` is for the loops, and still answers health")
    workers: int = Field(1, ge=1, le=64, description="API processes of one `halfnote serve`")
    accept: Accept = Field("all", description="`ends` refuses new halves while ends, checks and relay go on")
    allow_networks: Annotated[tuple[str, ...] | None, NoDecode] = Field(
        None,
        description="networks that callbacks and brokers may be dialled in although they are denied, "
        "comma-separated (docs/security.md); not set: loopback with the embedded Postgres, else none",
    )
    deny_networks: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="networks that are denied as well, unless allowed, comma-separated"
    )
    deny_ports: Annotated[tuple[int, ...], NoDecode] = Field(
        DENIED_PORTS,
        description="ports that callbacks and brokers may not name, comma-separated; a broker may have its kind's",
    )
    https_only: bool = Field(False, description="check URLs and webhooks must be https://, and brokers have TLS")
    tls_ca_file: FilePath | None = Field(
        None, description="PEM of the CAs that receivers and brokers may have besides the system's"
    )
    tls_cert_file: FilePath | None = Field(
        None, description="PEM of the client certificate that is shown to receivers and brokers, with its chain"
    )
    tls_key_file: FilePath | None = Field(
        None, description="PEM of that certificate's key; empty: it is in the same file"
    )
    proxy_url: SecretStr | None = Field(
        None,
        description="HTTP proxy for check URLs and webhooks, http://[user:password@]host:port; then it judges names, "
        "and none is taken from the environment",
    )
    secrets_key_file: Path | None = Field(
        None,
        description="the keys that secrets are sealed by in the database (docs/security.md); needed with a database of "
        "your own, and made in the data directory with the embedded Postgres",
    )
    origin: str = Field(
        "halfnote",
        max_length=253,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?$",
        description="the name by which webhooks that are asked for their consent know this service, like a DNS name",
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        ("127.0.0.1", "localhost", "::1", "testserver"),
        description="`Host` names that are answered, comma-separated; with `HALFNOTE_AUTH=keys` any, unless it is set",
    )

    key_rate_per_s: float | None = Field(
        None, gt=0, description="requests a second of one key in each process, unless the key has its own; past it 429"
    )
    key_in_flight_max: int | None = Field(
        None, ge=1, description="requests of one key under way in each process; past it 429"
    )
    request_timeout_s: float = Field(
        30.0, gt=0, description="within which a request must have arrived whole, and a response been taken"
    )
    connections_max: int = Field(
        10_000, ge=16, description="open connections of each process; past it those that rest longest are closed"
    )
    in_flight_max: int = Field(
        10_000, ge=1, description="requests under way in each process, but for probes and metrics; past it 503"
    )
    bodies_max_bytes: int = Field(
        64 * 1024 * 1024,
        ge=1024,
        description="bodies of requests under way in each process, together; past it 503 with Retry-After",
    )
    pool_size: int = Field(8, ge=2, description="database connections for everything but the flush lanes")
    batch_max: int = Field(500, ge=1, le=500, description="requests in one flush")
    queue_max: int = Field(10_000, ge=1, description="requests waiting for a flush; past it 503 with Retry-After")
    linger_s: float = Field(0.001, ge=0, le=0.1, description="wait for company before a flush, if others were waiting")
    poll_s: float = Field(
        0.001,
        ge=0,
        le=0.01,
        description="waits that are expected to be shorter are passed awake while one caller is alone; 0: none",
    )
    flush_timeout_s: float = Field(10.0, gt=0, description="a flush that takes longer is answered outcome-unknown")

    body_limit_bytes: int = Field(4 * 1024 * 1024, ge=1024, description="request body of a transaction")
    context_limit_bytes: int = Field(4096, ge=0, description="`context` of a half, as JSON")
    headers_limit_bytes: int = Field(8192, ge=0, description="`headers` of one message, names and values together")
    id_skew_s: int = Field(300, ge=1, description="how far a new transaction_id's time may be from the coordinator's")
    delay_limit_s: int = Field(40 * 86_400, ge=0, description="longest deliver_after_s")
    retention_s: int = Field(7 * 86_400, ge=3600, description="how long a settled day is kept")
    max_retention_s: int = Field(45 * 86_400, ge=3600, description="when a day leaves whatever holds it")
    archive: str | None = Field(
        None,
        description="directory or URL (any Hadoop filesystem) of the archive, without which no day leaves; empty: none",
    )
    archive_bodies: bool = Field(
        True, description="whether the archive has the messages' bodies, or only their digests"
    )
    archive_keep_s: int | None = Field(
        None, ge=86_400, description="how long a day stays in the archive, from its end; empty: for ever"
    )
    days_ahead: int = Field(7, ge=1, le=60, description="partitions made ahead of today")
    drain_s: float = Field(8.0, gt=0, description="how long SIGTERM waits for what is in flight")
    otlp_endpoint: str | None = Field(
        None,
        description="where spans go by OTLP over HTTP, as http://collector:4318; empty: nowhere. "
        "Needs halfnote-server[otel]; the OTEL_… variables say all else",
    )
    trace_ratio: float = Field(
        0.01, ge=0, le=1, description="share traced of the requests that come without a trace context of their own"
    )
    audit_keep_s: int = Field(400 * 86_400, ge=86_400, description="how long what people did is on record")
    check_concurrency: int = Field(64, ge=1, description="checks one worker asks at once, over all groups")

    @field_validator("allow_networks", "deny_networks", "deny_ports", "allowed_hosts", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator(
        "archive",
        "archive_keep_s",
        "otlp_endpoint",
        "tls_ca_file",
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
            # Without the value: it may be most of a key.
            raise ValueError(KEY_FORM)
        return SecretStr(text)

    def given_admin_key(self) -> str | None:
        """Return the admin's key that is in no database, if there is one. Raises BadKeyFile."""
        if self.admin_key is not None:
            return self.admin_key.get_secret_value()
        if self.admin_key_file is None:
            return None
        try:
            text = self.admin_key_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BadKeyFile(f"HALFNOTE_ADMIN_KEY_FILE cannot be read: {error}") from None
        if not is_key(text):
            raise BadKeyFile(f"What HALFNOTE_ADMIN_KEY_FILE holds {KEY_FORM}")
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
            raise ValueError("HALFNOTE_TLS_KEY_FILE is of no use without HALFNOTE_TLS_CERT_FILE")
        return self

    @model_validator(mode="after")
    def _room_for_a_body(self) -> Self:
        if self.bodies_max_bytes < self.body_limit_bytes:
            raise ValueError("HALFNOTE_BODIES_MAX_BYTES must have room for HALFNOTE_BODY_LIMIT_BYTES")
        return self

    @property
    def opened_networks(self) -> tuple[str, ...]:
        """The networks that are opened to callbacks and brokers."""
        if self.allow_networks is None:
            return LOOPBACK if self.embedded else ()
        return self.allow_networks

    @property
    def key_file(self) -> Path | None:
        """The keys of secrets at rest; None if none is named and the database is the user's own."""
        if self.secrets_key_file is None and self.embedded:
            return self.data_dir / "secrets.keys"
        return self.secrets_key_file

    @property
    def embedded(self) -> bool:
        """Whether this service runs its own Postgres."""
        return not self.database_url


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
