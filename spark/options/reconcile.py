"""The options of `halfnote reconcile`."""

import argparse
import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from spark.audit_retention import AUDIT_KEEP_S
from spark.certificate.signing import Signer, signer_of_command, signer_of_file
from spark.installations import NamesError, installations
from spark.options.common import DATABASE_URL, given_address, given_keep_s
from spark.usual import SHARE

BASE_URL = "HALFNOTE_BASE_URL"
AUDIT_KEEP = "HALFNOTE_AUDIT_KEEP_S"
# Several databases, `NAME=URL` each, with blanks or line feeds between them.
DATABASE_URLS = "HALFNOTE_DATABASE_URLS"


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; wrong usage ends the program with 2.

    Adds `installations`, which is empty with --from-parquet.
    """
    made = parser()
    options = made.parse_args(argv)
    urls = [] if options.from_parquet else options.database_url or _given_addresses()
    # The default is of one service.
    default = _default_base_url(made) if len(urls) < 2 else None
    base_urls = options.base_url or ([("", default)] if default else [])
    try:
        options.installations = installations(urls, options.read_url, base_urls if urls else ())
    except NamesError as error:
        made.error(str(error))
    options.base_url = base_urls[0][1] if base_urls else None
    if not options.from_parquet and not urls:
        made.error(f"the source is missing: give a database (--database-url or {DATABASE_URL}) or --from-parquet")
    if options.from_parquet and options.read_url:
        made.error("--from-parquet reads no database, so --read-url has no effect; leave one of them out")
    if options.producer_ledger_complete and not options.producer_ledger:
        made.error("--producer-ledger-complete needs --producer-ledger")
    if options.consumer_ledger_complete and not options.consumer_ledger:
        made.error("--consumer-ledger-complete needs --consumer-ledger")
    names = {one.name for one in options.installations}
    if unknown := [name for name, _ in options.audit_keep_s_of if name not in names]:
        made.error(f"--audit-keep-s-of names {unknown[0]}, which is no installation of this run")
    if options.certificate_command and options.certificate_key:
        made.error("give either --certificate-key or --certificate-command")
    if options.certificate_command and not options.certificate_public_key:
        made.error("--certificate-command needs --certificate-public-key")
    return options


def signer_of(options: argparse.Namespace) -> Signer | None:
    """Return what signs certificates; None: they stay unsigned. Raises SigningError."""
    if options.certificate_command:
        return signer_of_command(options.certificate_command, options.certificate_public_key)
    return signer_of_file(options.certificate_key) if options.certificate_key else None


def parser() -> argparse.ArgumentParser:
    """Return the parser, with the environment's values as defaults."""
    made = argparse.ArgumentParser(
        prog="halfnote reconcile", description="The nightly proof. Exit status: 0 proved, 3 findings"
    )
    _add_source(made)
    _add_ledgers(made)
    _add_certificates(made)
    _add_audit(made)
    add = made.add_argument
    add(
        "--out",
        metavar="DIR",
        help="write findings (Parquet by day) and report.html to a path or a URL that Spark supports",
    )
    add(
        "--base-url",
        type=_http_url,
        action="append",
        default=[],
        metavar="[NAME=]URL",
        help=f"URL of the service, for the links of the report; default: {BASE_URL}; of several services, each by name",
    )
    add(
        "--sla-s", type=float, default=3600.0, help="a message not delivered after this time is a finding; default 3600"
    )
    _add_usual(made)
    add("--margin-s", type=float, default=3600.0, help="a day is final 72 h plus this time after its end; default 3600")
    add(
        "--master",
        help="Spark's master or Connect server (sc://…); default: SPARK_REMOTE, spark-submit's, else all cores here",
    )
    add("--staging", type=Path, metavar="DIR", help="directory for rows during the run; every executor must reach it")
    add("--keep-staging", action="store_true", help="keep the staged rows, for inspection or for --from-parquet")
    return made


def _add_usual(made: argparse.ArgumentParser) -> None:
    add = made.add_argument
    share = (
        "a topic, group or subscription with less than this share of its usual count is a finding; 0: never; default"
    )
    add("--usual-share", type=_share, metavar="SHARE", default=SHARE, help=f"{share} {SHARE}")
    add(
        "--usual-share-of",
        type=_share_of,
        action="append",
        default=[],
        metavar="NAME=SHARE",
        help="the same for one of them: topic:orders=0, group:shop=0.5, subscription:mailer=0; repeatable",
    )


def _share(value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError("must be a share from 0 to less than 1")
    return share


def _share_of(value: str) -> tuple[str, float]:
    name, equals, share = value.rpartition("=")
    if not equals or not name.startswith(("topic:", "group:", "subscription:")):
        raise argparse.ArgumentTypeError("must be topic:NAME=SHARE, group:NAME=SHARE or subscription:NAME=SHARE")
    return name, _share(share)


def _add_source(made: argparse.ArgumentParser) -> None:
    add = made.add_argument
    primary = (
        f"the primary, which gets the results; default: {DATABASE_URL}; repeatable: one proof over several "
        f"installations; also {DATABASE_URLS}"
    )
    add("--database-url", action="append", default=[], metavar="[NAME=]URL", help=primary)
    standby = "a standby to read from instead; of several installations, each by name"
    add("--read-url", action="append", default=[], metavar="[NAME=]URL", help=standby)
    days = "prove this day, YYYY-MM-DD; repeatable; default: every day that is not final or has changed"
    add("--day", type=date.fromisoformat, action="append", default=[], help=days)
    add(
        "--from-parquet",
        metavar="DIR",
        help="read frames or an archive instead of a database, and write to no database",
    )


def _add_ledgers(made: argparse.ArgumentParser) -> None:
    add = made.add_argument
    add(
        "--producer-ledger",
        metavar="SPEC",
        help="the verdicts in producers' databases: Parquet, CSV, or a jdbc: or kafka: URL",
    )
    complete = "the producer ledger has every commit: a committed transaction without a row is a finding"
    add("--producer-ledger-complete", action="store_true", help=complete)
    add(
        "--consumer-ledger",
        metavar="SPEC",
        help="the messages in consumers' databases: Parquet, CSV, or a jdbc: or kafka: URL",
    )
    empty = "the consumer ledger has every message, so one without rows says that nothing was consumed"
    add("--consumer-ledger-complete", action="store_true", help=empty)


def _add_certificates(made: argparse.ArgumentParser) -> None:
    add = made.add_argument
    given = {name: os.environ.get(f"HALFNOTE_CERTIFICATE_{name}") or None for name in ("KEY", "COMMAND", "PUBLIC_KEY")}
    key = "PEM file with the Ed25519 key that signs certificates; default: HALFNOTE_CERTIFICATE_KEY; none: unsigned"
    add("--certificate-key", type=Path, metavar="FILE", default=_path(given["KEY"]), help=key)
    command = (
        "command that signs: it gets bytes on stdin and prints the signature in base64; default: "
        "HALFNOTE_CERTIFICATE_COMMAND"
    )
    add("--certificate-command", metavar="COMMAND", default=given["COMMAND"], help=command)
    public = "PEM file with the public key of the command; default: HALFNOTE_CERTIFICATE_PUBLIC_KEY"
    add("--certificate-public-key", type=Path, metavar="FILE", default=_path(given["PUBLIC_KEY"]), help=public)


def _add_audit(made: argparse.ArgumentParser) -> None:
    kept = (
        "the service keeps rows of the audit for S seconds, a day to 100 years; a younger one that is gone is a "
        f"finding; default: {AUDIT_KEEP}, else {AUDIT_KEEP_S}"
    )
    default = os.environ.get(AUDIT_KEEP) or str(AUDIT_KEEP_S)
    made.add_argument("--audit-keep-s", type=given_keep_s, metavar="S", default=default, help=kept)
    of_one = "the same for one of several installations; repeatable"
    made.add_argument("--audit-keep-s-of", type=_keep_s_of, action="append", default=[], metavar="NAME=S", help=of_one)


def _keep_s_of(value: str) -> tuple[str, int]:
    name, equals, seconds = value.rpartition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError("must be NAME=S, with the name of an installation")
    return name, given_keep_s(seconds)


def _path(value: str | None) -> Path | None:
    return None if value is None else Path(value)


def _given_addresses() -> list[str]:
    several = os.environ.get(DATABASE_URLS, "").split()
    one = given_address(os.environ)
    return several or ([one] if one else [])


def _default_base_url(made: argparse.ArgumentParser) -> str | None:
    given = os.environ.get(BASE_URL)
    try:
        return _http_url(given)[1] if given else None
    except argparse.ArgumentTypeError as error:
        made.error(f"{BASE_URL} {error}")


def _http_url(value: str) -> tuple[str, str]:
    """Return name and URL; the name is empty without one."""
    name, equals, url = value.partition("=")
    if not equals or name.startswith(("http://", "https://")):
        name, url = "", value
    if not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError("must be an http or https URL")
    return name, url
