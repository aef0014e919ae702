"""Domain errors with their HTTP status and problem type (RFC 9457); `docs/errors.md` is generated from this file."""

from typing import Any, ClassVar

import msgspec

TYPE_PREFIX = "/problems/"


class Problem(Exception):
    """An expected refusal. The class says what it means and what to do; `detail` explains it for this request."""

    status: ClassVar[int] = 500
    slug: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"

    def __init__(self, detail: str, *, retry_after_s: int | None = None, **extra: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.extra = extra

    def body(self) -> bytes:
        """Return the problem document as JSON bytes."""
        return msgspec.json.encode(
            {
                "type": TYPE_PREFIX + self.slug,
                "title": self.title,
                "status": self.status,
                "detail": self.detail,
                **self.extra,
            }
        )

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the problem's response headers in ASGI form."""
        headers = [(b"content-type", b"application/problem+json")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        return headers


class InternalError(Problem):
    """A defect of Halfnote. The log has the trace under the same `request_id`. Repeating a half with its id is safe."""


class MalformedJson(Problem):
    """The body is not JSON in UTF-8 (NaN, Infinity, lone surrogates and unlimited nesting are not JSON).

    Fix the body; nothing was stored.
    """

    status, slug, title = 400, "malformed-json", "Malformed JSON"


class BadRequest(Problem):
    """The request is not valid HTTP. The detail says why; nothing was stored."""

    status, slug, title = 400, "bad-request", "Bad request"


class Unauthenticated(Problem):
    """The request has no valid key: the key is missing, unknown, expired or revoked. The detail says which.

    Send `Authorization: Bearer hn_…`. An admin makes keys with `POST /api-keys` or `halfnote keys create`.
    """

    status, slug, title = 401, "unauthenticated", "A valid key is needed"

    def __init__(self, detail: str, *, invalid: bool = False) -> None:
        super().__init__(detail)
        self._challenge = b'Bearer realm="halfnote"' + (b', error="invalid_token"' if invalid else b"")

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the response headers, including `WWW-Authenticate`."""
        return [*super().headers(), (b"www-authenticate", self._challenge)]


class Forbidden(Problem):
    """The key is valid but does not permit this.

    `missing` says what it lacks: a role, or a name in the scope `groups`, `topics` or `subscriptions`. Outside of the
    scope the answer is the same whether the named resource exists or not. An admin can make a key with the missing
    permission.
    """

    status, slug, title = 403, "forbidden", "The key does not permit this"


class SignInRefused(Problem):
    """The sign-in by OpenID Connect did not end in a session: the issuer refused, its answer is not the one of this
    browser's sign-in, its ID token is not valid, or the person has no role here.

    The detail says which. Begin again. `HALFNOTE_OIDC_ROLES` gives roles.
    """

    status, slug, title = 403, "sign-in-refused", "Not signed in"


class NotThisMachine(Problem):
    """Auth is off, and the request comes from another machine.

    Set HALFNOTE_AUTH=keys to allow other machines, each with a key.
    """

    status, slug, title = 403, "not-this-machine", "Auth is off"


class WrongGroup(Problem):
    """The transaction belongs to another producer group. Send the name of the group that posted the half."""

    status, slug, title = 403, "wrong-group", "Another group's transaction"


class ForeignOrigin(Problem):
    """The request was made by a web page of another origin. Halfnote is called by services, not by pages."""

    status, slug, title = 403, "foreign-origin", "Foreign origin"


class NotFound(Problem):
    """The path does not exist. `GET /openapi.json` and `/docs` list all paths."""

    status, slug, title = 404, "not-found", "Not found"


class TransactionUnknown(Problem):
    """No transaction has this id.

    Its half was never acknowledged: post the half (again, with the same id) before the end.
    """

    status, slug, title = 404, "transaction-unknown", "Unknown transaction"


class MessageUnknown(Problem):
    """No message has this id. A message_id is `<transaction_id>-<position>`, as in the answer of `/half`."""

    status, slug, title = 404, "message-unknown", "Unknown message"


class GroupUnknown(Problem):
    """No producer group has this name. Register it with `PUT /producer-groups/{name}`."""

    status, slug, title = 404, "group-unknown", "Unknown producer group"


class SubscriptionUnknown(Problem):
    """No subscription has this name. Create it with `PUT /subscriptions/{name}`."""

    status, slug, title = 404, "subscription-unknown", "Unknown subscription"


class DeadLetterUnknown(Problem):
    """The subscription has no such dead letter.

    It may have been redelivered or dropped: `GET /transactions/{id}` shows the message's deliveries. To get the
    dead letter of a replay, send `replay`.
    """

    status, slug, title = 404, "dead-letter-unknown", "Unknown dead letter"


class ReplayUnknown(Problem):
    """The subscription has no replay with this id. `GET /subscriptions/{name}/replays` lists its replays."""

    status, slug, title = 404, "replay-unknown", "Unknown replay"


class DayNotReconciled(Problem):
    """No run of the nightly proof has examined this day; `days` names the newest examined days.

    A run examines the days that are in the database: `halfnote reconcile`.
    """

    status, slug, title = 404, "day-not-reconciled", "Not a reconciled day"


class DayNotCertified(Problem):
    """This day has no certificate. The nightly proof writes one when the day becomes final."""

    status, slug, title = 404, "day-not-certified", "Not a certified day"


class FindingUnknown(Problem):
    """No finding has this id. `GET /findings` lists all findings, open and resolved."""

    status, slug, title = 404, "finding-unknown", "Unknown finding"


class ApiKeyUnknown(Problem):
    """No API key has this id. `GET /api-keys` lists all keys."""

    status, slug, title = 404, "api-key-unknown", "Unknown API key"


class TopicUnknown(Problem):
    """No topic with this name is declared. `GET /topics` lists all topics."""

    status, slug, title = 404, "topic-unknown", "Unknown topic"


class MethodNotAllowed(Problem):
    """The path exists, but not with this method; `Allow` names its methods."""

    status, slug, title = 405, "method-not-allowed", "Method not allowed"

    def __init__(self, detail: str, *, allow: str) -> None:
        super().__init__(detail)
        self.allow = allow

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the response headers, including `Allow`."""
        return [*super().headers(), (b"allow", self.allow.encode())]


class RequestTimeout(Problem):
    """The request did not arrive whole within HALFNOTE_REQUEST_TIMEOUT_S, so the connection was closed.

    Nothing was stored. Send the request again, on a new connection.
    """

    status, slug, title = 408, "request-timeout", "The request took too long to arrive"


class ContentDiffers(Problem):
    """This transaction_id is stored with different content.

    `field` names the first field that differs. Choose a new id for a new transaction, or repeat the first request
    unchanged.
    """

    status, slug, title = 409, "content-differs", "The id is stored with other content"


class ApiKeyTaken(Problem):
    """The request chose a key that exists, or existed and was revoked. Choose another one, or let Halfnote make it."""

    status, slug, title = 409, "api-key-taken", "This key exists"


class ApiKeyOver(Problem):
    """The key was revoked or has expired, so it cannot be rotated. Make a new one with `POST /api-keys`."""

    status, slug, title = 409, "api-key-over", "The API key is over"


class VerdictConflict(Problem):
    """The transaction already has the opposite verdict, permanently; `recorded` has its source and time.

    If your commit came after a rollback, `POST /transactions/{id}/reissue` sends its messages as a new transaction.
    """

    status, slug, title = 409, "verdict-conflict", "Already decided the other way"


class ChecksNotClaimed(Problem):
    """The producers of this group may not claim its checks: Halfnote calls its check URLs.

    PUT or PATCH the group with `checks: claim`.
    """

    status, slug, title = 409, "checks-not-claimed", "Checks of this group are not claimed"


class CheckLapsed(Problem):
    """The claim of this check is over: its time has passed, or it was answered. The answer changed nothing.

    Claim the check again. A commit or rollback is taken also after the claim is over.
    """

    status, slug, title = 409, "check-lapsed", "The claim of the check is over"


class TooEarly(Problem):
    """The transaction is not in doubt yet: its producer may still be working.

    Wait until `first_check_at`, or send `force: true`.
    """

    status, slug, title = 409, "too-early", "Not in doubt yet"


class AlreadyDecided(Problem):
    """The transaction already has its verdict, so no check is needed."""

    status, slug, title = 409, "already-decided", "Already decided"


class NotCommitted(Problem):
    """Only messages of a committed transaction are sent to subscriptions.

    `POST /transactions/{id}/verdict` decides one in doubt; `POST /transactions/{id}/reissue` sends the messages of one
    that was rolled back.
    """

    status, slug, title = 409, "not-committed", "Not committed"


class NotRolledBack(Problem):
    """Only a rolled-back transaction can be reissued, and only once; `state` or `reissued_as` says why not."""

    status, slug, title = 409, "not-reissuable", "Not a rolled-back transaction"


class GroupInUse(Problem):
    """The group has undecided transactions (`undecided`).

    Wait until they end, or decide them with `POST /transactions/verdict`, then repeat the delete.
    """

    status, slug, title = 409, "group-in-use", "The group has undecided transactions"


class NotSigned(Problem):
    """Only webhooks have a signing secret. Change a broker's password or token with `PUT /subscriptions/{name}`."""

    status, slug, title = 409, "not-signed", "Nothing is signed for this destination"


class NotPulled(Problem):
    """Workers deliver the messages of this subscription (`destination.type`), so consumers cannot claim them.

    Create a subscription with the destination `{"type": "pull"}`.
    """

    status, slug, title = 409, "not-pulled", "Not a subscription to claim from"


class NothingSent(Problem):
    """Consumers claim the messages of this subscription, so Halfnote sends nothing to any address.

    Claim a message with `POST /subscriptions/{name}/claim`.
    """

    status, slug, title = 409, "nothing-sent", "Nothing is sent for this subscription"


class NotHeld(Problem):
    """The message is not the consumer's any more: its time is over, or it was settled before. Nothing was changed.

    The message comes again, to this consumer or another, unless it was acknowledged. Hold it for longer from the
    beginning (`invisible_s`), or extend the time while the work goes on.
    """

    status, slug, title = 409, "not-held", "The message is not held"


class HandleInvalid(Problem):
    """Halfnote has not made this handle for a message of this subscription. Send the `handle` of a claim's answer."""

    status, slug, title = 422, "handle-invalid", "Not a handle of this subscription"


class ReplayOver(Problem):
    """The replay has ended (`state`), so it cannot be canceled."""

    status, slug, title = 409, "replay-over", "The replay is over"


class ReplayRunning(Problem):
    """A replay of the same messages to this subscription runs already: `replay_id`, up to the offset `until`.

    Another one would send each of them twice. Wait for its end, or cancel it. A replay that has read its part of the
    log, and only waits for retries, refuses another one for 10 minutes after its beginning; later both send what waits.
    """

    status, slug, title = 409, "replay-running", "The same replay is running"


class TooManyReplays(Problem):
    """The subscription already runs the maximum number of replays (`limit`). Wait for one to end, or cancel one."""

    status, slug, title = 409, "too-many-replays", "Too many replays"


class LogGone(Problem):
    """The requested part of the log was removed from the database. `oldest` is the lowest offset there is."""

    status, slug, title = 410, "log-gone", "That part of the log is gone"


class DayGone(Problem):
    """The transaction's day was removed from the database.

    `archive` names its archive, or is null if it is not archived.
    """

    status, slug, title = 410, "day-gone", "The day is gone"


class SubscriptionExists(Problem):
    """The request has `If-None-Match: *`, so it only creates, and there is a subscription with this name.

    Nothing was changed. `GET /subscriptions/{name}` shows it; the same PUT without the header changes it, and a PATCH
    changes some fields.
    """

    status, slug, title = 412, "subscription-exists", "The subscription exists"


class BodyTooLarge(Problem):
    """The request body is over the limit (`limit_bytes`, HALFNOTE_BODY_LIMIT_BYTES; 4 KiB for the console's sign-in).

    Send a smaller body, or a reference to the content.
    """

    status, slug, title = 413, "body-too-large", "Request body too large"


class WrongContentType(Problem):
    """Requests with a body must be `application/json` (UTF-8). This prevents posts from foreign web pages."""

    status, slug, title = 415, "content-type", "Content-Type must be application/json"


class ContentEncoded(Problem):
    """The body has a `Content-Encoding`, such as gzip. Halfnote does not decode bodies. Send it without one."""

    status, slug, title = 415, "content-encoding", "The body is encoded"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the response headers, including `Accept-Encoding` (RFC 9110 §15.5.16)."""
        return [*super().headers(), (b"accept-encoding", b"identity")]


class HostNotAllowed(Problem):
    """The `Host` header names a host that this service does not serve (DNS may have redirected a browser here).

    Use the service's own address, or name the host in HALFNOTE_ALLOWED_HOSTS.
    """

    status, slug, title = 421, "host-not-allowed", "Host not allowed"


class HeadTooLarge(Problem):
    """The first line and headers are over `HALFNOTE_HEAD_LIMIT_BYTES` (64 KiB) together. Send fewer or shorter ones."""

    status, slug, title = 431, "head-too-large", "Request head too large"


class Invalid(Problem):
    """A field has a wrong value. `field` names it and the detail says what is expected; nothing was stored."""

    status, slug, title = 422, "invalid", "Invalid request"


class IdTimeSkew(Problem):
    """A new transaction_id must carry a time within `HALFNOTE_ID_SKEW_S` (by default 5 minutes) of the coordinator's.

    `coordinator_time`, `id_time` and `skew_s` show the difference. Set the producer's clock, or let the coordinator
    choose the id.
    """

    status, slug, title = 422, "id-time-skew", "The id's time is too far from the coordinator's"


class GroupUnregistered(Problem):
    """A half needs a registered producer group; without one, Halfnote has no check URL to ask.

    Register it with `PUT /producer-groups/{name}`.
    """

    status, slug, title = 422, "group-unregistered", "Unregistered producer group"


class TopicReserved(Problem):
    """Topics that begin with `halfnote.` are Halfnote's own. Choose another name."""

    status, slug, title = 422, "topic-reserved", "Reserved topic"


class TopicUndeclared(Problem):
    """HALFNOTE_TOPICS=declared is set, and this topic is not declared. Check its spelling.

    An admin declares it with `PUT /topics/{name}`. Nothing was stored.
    """

    status, slug, title = 422, "topic-undeclared", "Undeclared topic"


class GroupReserved(Problem):
    """The producer group `halfnote` is Halfnote's own: operational messages come from it. Choose another name."""

    status, slug, title = 422, "group-reserved", "Reserved producer group"


class AddressNotAllowed(Problem):
    """This service may not dial the check URL, webhook or broker: its address or port is denied, or TLS is missing.

    The detail names the setting: HALFNOTE_ALLOW_NETWORKS opens denied networks, HALFNOTE_DENY_PORTS denies ports,
    HALFNOTE_HTTPS_ONLY requires TLS.
    """

    status, slug, title = 422, "address-not-allowed", "Address not allowed"


class SecretsUnreadable(Problem):
    """Secrets cannot be sealed or opened: a key is missing from HALFNOTE_SECRETS_KEY_FILE, or differs.

    `key` is the id of the missing key. Put it back and repeat; nothing is lost. If the key is lost permanently, a PUT
    with a new secret or password replaces the sealed one.
    """

    status, slug, title = 503, "secrets-unreadable", "Secrets unreadable"


class ClientNotInstalled(Problem):
    """The service lacks the client for this kind of broker.

    Run `command` on every replica, restart the service and repeat.
    """

    status, slug, title = 422, "client-not-installed", "The broker's client is not installed"


class ConsentRefused(Problem):
    """The webhook was asked for its consent (`OPTIONS`, CloudEvents' HTTP webhooks §4) and did not give it.

    The detail has its answer. Make it answer with `WebHook-Allowed-Origin`, or send `consent: false`.
    """

    status, slug, title = 422, "consent-refused", "The webhook did not consent"


class TooManyRequests(Problem):
    """This key exceeds HALFNOTE_KEY_RATE_PER_S or its own rate, or HALFNOTE_KEY_IN_FLIGHT_MAX requests at once.

    Nothing was stored. Repeat after `Retry-After` seconds.
    """

    status, slug, title = 429, "too-many-requests", "Too many requests of one key"


class Overloaded(Problem):
    """More requests wait than HALFNOTE_QUEUE_MAX, more are in flight than HALFNOTE_IN_FLIGHT_MAX, their bodies have
    more than HALFNOTE_BODIES_MAX_BYTES together, or more event streams are open than HALFNOTE_EVENT_STREAMS_MAX.

    Nothing was stored. Repeat after `Retry-After` seconds.
    """

    status, slug, title = 503, "overloaded", "Too many requests are waiting"


class Draining(Problem):
    """New halves are refused while this service drains; ends are still accepted.

    HALFNOTE_ACCEPT=ends or `halfnote drain` was set, or the service is stopping. Send the half to another replica, or
    after `Retry-After` seconds.
    """

    status, slug, title = 503, "draining", "New halves are refused"


class OutcomeUnknown(Problem):
    """The database did not confirm the commit: it may or may not have happened.

    Repeat the request with the `transaction_id` named here; this is safe and returns the outcome.
    """

    status, slug, title = 503, "outcome-unknown", "Outcome unknown"


class IssuerFailed(Problem):
    """The issuer of OpenID Connect does not answer, is at an address that this service may not dial, or answers what
    cannot be right.

    The detail says which. Try again, or sign in with an API key. If it stays so, compare HALFNOTE_OIDC_ISSUER, the
    client's id and secret, and HALFNOTE_ALLOW_NETWORKS with the issuer.
    """

    status, slug, title = 502, "issuer-failed", "The issuer cannot be used"


class DatabaseUnavailable(Problem):
    """The database cannot be reached or refused the statement.

    Nothing was acknowledged. Repeat after `Retry-After` seconds; it recovers by itself.
    """

    status, slug, title = 503, "database-unavailable", "Database unavailable"


class DatabaseReadOnly(Problem):
    """The database is read-only or in recovery (a standby, or a failover in progress).

    Nothing was stored. Repeat after `Retry-After` seconds; it recovers by itself.
    """

    status, slug, title = 503, "database-read-only", "Database read-only"


class StorageFull(Problem):
    """The database's disk is full. Nothing was stored. Free some space; repeat after `Retry-After` seconds."""

    status, slug, title = 503, "storage-full", "Storage full"


class NotReady(Problem):
    """The service is starting or its database lacks migrations; `GET /readyz` says what is missing."""

    status, slug, title = 503, "not-ready", "Not ready"


def all_problems() -> list[type[Problem]]:
    """Return every problem type, sorted by status and then name, the order of the documentation."""
    return sorted({InternalError, *Problem.__subclasses__()}, key=lambda problem: (problem.status, problem.slug))
