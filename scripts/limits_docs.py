"""Write docs/limits.md from the constants in the code: `make docs`."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "limits.md"

HEAD = """# Limits

These limits are fixed. Those that depend on an installation are settings ([configuration](configuration.md)). Past a
limit of a request the answer is 422 `invalid` with the `field`, unless the table says more. `make docs` generates this
page from the code.
"""


@dataclass(frozen=True, slots=True)
class Limit:
    """A constant of a module, and what it limits."""

    constant: str
    what: str


REQUESTS = (
    Limit("app.field_rules.NAME_MAX", "characters of a name: topic, key, tag, producer group, subscription"),
    Limit("app.field_rules.REASON_MAX", "characters of a person's `reason`"),
    Limit("app.coordinator.wire.MESSAGES_MAX", "messages of one transaction"),
    Limit("app.coordinator.wire.TRANSACTIONS_MAX", "transactions of one request to `/halves`, `/ends`, `/messages`"),
    Limit("app.coordinator.wire.POLICY_MAX_S", "seconds of a half's own check immunity and check interval"),
    Limit("app.server.request_head.HOST_MAX_BYTES", "bytes of a `Host` header; above it 400"),
    Limit("app.egress.urls.LONGEST_URL", "characters of a URL"),
    Limit("app.routers.transactions.PAGE_MAX", "rows on a page of a list"),
    Limit(
        "app.store.coordinator.deliveries.DELIVERIES_MAX",
        "deliveries of a transaction or of a message in one answer; its `deliveries_cursor` leads to the others",
    ),
    Limit(
        "app.operations.delivery_reasons.explain.EXPLAINED_MAX",
        "deliveries that one answer of `/transactions/{id}/delivery` explains; `deliveries_cursor` leads to the others",
    ),
    Limit("app.routers.stats.POINTS_MAX", "points of a series of `/stats/series`"),
    Limit("app.routers.transaction_selection.MANY_MAX", "transactions of one verdict, check or reissue by filter"),
    Limit("app.schemas.totals.COUNTED_MOST", "rows that the `total` of a list counts"),
    Limit("app.schemas.dead_letters.IDS_MAX", "dead letters named in one redelivery or drop"),
    Limit("app.schemas.dead_letters.AT_MOST", "dead letters of one redelivery or drop by filter"),
    Limit("app.schemas.api_keys.SCOPE_MAX", "names in each scope of an API key"),
    Limit("app.schemas.api_keys.OVERLAP_MAX_S", "seconds for which a rotated key stays valid"),
    Limit("app.lifecycle.startup.ISSUER_LIMIT_BYTES", "bytes of an answer of the issuer of OpenID Connect"),
    Limit(
        "app.console.asgi.SIGN_IN_FORM_BYTES",
        "bytes of a form of the console's sign-in or sign-out without a session; above it 413",
    ),
    Limit("app.console.openid.sign_in.LASTS_S", "seconds that a sign-in at the issuer may take"),
    Limit("app.console.openid.people.KEPT_BYTES", "bytes of a claim's values that a session of the console keeps"),
    Limit("app.console.acts.dead_letters.AT_ONCE", "dead letters of one act of the console by filter, the newest"),
    Limit("app.routers.claim_audit.IDS_NOTED", "messages that an audit row of an admin's claim or ack names"),
    Limit(
        "app.operations.proof_report.BYTES_MAX", "bytes of the report of the nightly proof; a larger one is not shown"
    ),
    Limit("app.observability.trace_context.MEMBERS_MAX", "members of a `tracestate`; longer ones are dropped"),
)

GROUPS = (
    Limit("app.schemas.producer_groups.URLS_MAX", "check URLs of a producer group"),
    Limit(
        "app.checkback.check_batches.BATCH_CHECKS_MAX",
        "transactions of one call with `batch_checks`, within `HALFNOTE_CHECK_CONCURRENCY` and `check_max_in_flight`",
    ),
    Limit("app.checkback.check_batches.BATCH_BYTES", "bytes of messages in such a call, unless one has more"),
    Limit(
        "app.checkback.check_requests.MORE_FOR_EACH_BYTES",
        "bytes that the answer to such a call may have more for each transaction",
    ),
    Limit("app.schemas.claimed_checks.CLAIM_MAX", "checks of one claim"),
    Limit(
        "app.checkback.claimed_checks.CLAIM_BYTES", "bytes of messages in the answer to a claim, unless one has more"
    ),
    Limit("app.schemas.claimed_checks.INVISIBLE_MAX_S", "seconds for which a claim may hold its checks"),
    Limit("app.schemas.claimed_checks.WAIT_MAX_S", "seconds for which a claim may wait for a check"),
    Limit("app.schemas.claimed_checks.ANSWERS_MAX", "answers to checks in one request"),
    Limit(
        "app.checkback.registrations.ASKED_WITHIN_S",
        "seconds after which a registration begins no new batch of unanswered checks to make due; a worker goes on "
        "with the others",
    ),
    Limit(
        "app.store.checkback.rounds.DUE_MOST",
        "due checks of a group from which on a registration makes no more due; a worker goes on when there are fewer",
    ),
    Limit("app.store.checkback.rounds.AT_ONCE", "checks that a batch of a registration makes due"),
    Limit(
        "app.store.checkback.rounds.URGED_APART_S",
        "seconds between two checks of one transaction that registrations ask for",
    ),
    Limit("app.store.checkback.producer_groups.UNDECIDED_MAX", "undecided transactions that a refused delete counts"),
    Limit("app.schemas.subscription_put.TOPICS_MAX", "topics of a subscription"),
    Limit("app.schemas.subscription_put.TAGS_MAX", "tags of a subscription's filter"),
    Limit("app.schemas.subscription_put.RETRIES_MAX", "waits in a subscription's `retry`"),
    Limit("app.schemas.subscription_put.SHARDS_MAX", "shards of a subscription"),
    Limit("app.field_rules.RATE_LEAST_PER_S", "the lowest `rate_per_s` of a subscription or a key"),
    Limit("app.schemas.destination_fields.HEADERS_MAX", "own headers of a webhook"),
    Limit("app.schemas.destination_fields.HEADER_NAME_MAX", "characters of such a header's name"),
    Limit("app.schemas.destination_fields.HEADER_VALUE_MAX", "characters of such a header's value"),
    Limit("app.schemas.destination_fields.CREDENTIAL_MAX", "characters of a broker's credential"),
    Limit("app.schemas.addresses.HOST_PORT_MAX", "characters of a broker's host and port"),
    Limit("app.schemas.replays.KEYS_MAX", "keys of one replay"),
    Limit("app.schemas.claims.HANDLES_MAX", "messages that a consumer settles in one request"),
    Limit("app.schemas.claims.WAIT_MOST_S", "seconds for which a claim of messages waits"),
    Limit(
        "app.pull.claiming.PUT_OFF_AT_ONCE",
        "messages that are delayed, or whose key is out, after which a claim reads no more of the log: `more: true`",
    ),
    Limit("app.schemas.claims.RETRY_AFTER_MOST_S", "seconds of a consumer's `retry_after_s`"),
    Limit("app.routers.replays.RUNNING_MAX", "replays of a subscription that run at once; above it 409"),
)

DELIVERY = (
    Limit("app.egress.reply.REPLY_LIMIT_BYTES", "bytes that are read of a receiver's or a producer's answer"),
    Limit("app.egress.http_connection.HEADERS_MAX", "headers of such an answer; more fail the attempt"),
    Limit("app.egress.http_connection.HEADER_BYTES", "bytes of one header of such an answer; more fail the attempt"),
    Limit("app.destinations.webhook.REASON_LIMIT", "characters kept of the reason that a receiver gives"),
    Limit("app.egress.reply.RETRY_AFTER_MAX_S", "seconds of a receiver's `Retry-After`; a longer one is cut"),
    Limit("app.egress.http_client.KEEPALIVE_S", "seconds for which an idle connection to a receiver is used again"),
    Limit(
        "app.egress.http_client.AGAIN_WITHIN_S",
        "seconds within which a request on a reused connection is sent again if the receiver closes it unanswered",
    ),
    Limit("app.egress.resolver.LOOKUP_S", "seconds for which the addresses of a name are used again"),
    Limit("app.egress.resolver.FAILED_S", "seconds for which a name is not looked up again after a failure"),
    Limit("app.egress.resolver.LOOKUPS_MAX", "names that a process looks up at once, each in a thread"),
    Limit("app.egress.resolver.UNPROVEN_MAX", "of these, names that were never looked up, or slow the last time"),
    Limit("app.egress.resolver.SLOW_MAX", "of these, names whose last lookup was slow"),
    Limit("app.egress.resolver.SLOW_S", "seconds from which on a lookup is slow"),
    Limit("app.egress.resolver.LASTING_MAX", "lookups that go on besides, of names that were quick and are slow now"),
    Limit("app.egress.resolver.NAMES_MAX", "names of which a process remembers whether the last lookup was slow"),
    Limit("app.relay.settle_buffer.RECEIPT_WITHIN_S", "seconds that a receipt may wait to be stored with others"),
    Limit("app.destinations.batching.AGAIN_S", "seconds after which a message of a cut-off batch comes again"),
    Limit(
        "app.destinations.batching.REMEMBERED_MOST",
        "messages of cut-off batches that a shard remembers, to send them in smaller ones",
    ),
    Limit(
        "app.policy.delivery_retry.SHORTEST_WAIT_S",
        "the shortest wait after an answer with `Retry-After`, in seconds; the waits of `retry` have no such limit",
    ),
    Limit(
        "app.policy.circuit_breaker.LIMITS_AT_MOST_S",
        "seconds after which a receiver that only asks for pauses counts as down, if it took no message",
    ),
    Limit("app.policy.check_schedule.FIRST_BACKOFF_S", "the wait after the first unanswered check, in seconds"),
    Limit("app.policy.check_schedule.LONGEST_BACKOFF_S", "the longest wait between unanswered checks, in seconds"),
    Limit(
        "app.store.checkback.claims.CLAIMERS_FIRST_S",
        "seconds for which a check is left to producers that claim, before a URL is called",
    ),
    Limit(
        "app.runtime.state.REPEAT_LOOKS", "refused halves that are looked up at once, because a stored one is answered"
    ),
    Limit("app.relay.key_order.HELD_MOST", "messages that a shard holds back for busy keys"),
    Limit("app.relay.key_order.DEFERRED_MOST", "messages that wait for their keys in a shard without their bodies"),
    Limit("app.relay.stream.AHEAD_MOST", "log entries that a shard reads on beyond a message that waits for its key"),
    Limit("app.relay.key_order.BODIES_OF_KEY", "bodies of waiting messages of a key that a full shard keeps in memory"),
    Limit("app.store.relay.log.WINDOW_BYTES", "bytes of bodies that a shard reads at once, unless one is larger"),
    Limit(
        "app.relay.window.UNSETTLED_BYTES",
        "bytes of unsettled bodies past which a shard reads no more of the log, and claims no more retries",
    ),
    Limit("app.destinations.kafka.BATCH_MAX", "messages of one Kafka request"),
    Limit(
        "app.destinations.kafka.REFUSED_MOST",
        "records in a row that a rule of a Kafka topic refuses and that are dead letters; later ones are retried",
    ),
    Limit(
        "app.destinations.kafka.REFUSED_EVERY_S",
        "seconds in which one record is a dead letter of a Kafka topic that refuses all",
    ),
    Limit("app.destinations.kafka_producer.BATCH_BYTES", "bytes of one batch of a Kafka partition"),
    Limit("app.destinations.nats.BATCH_MAX", "messages that one NATS connection has in flight together"),
    Limit(
        "app.destinations.nats.SUBJECT_BYTES",
        "bytes of a NATS subject; a longer one makes the message a dead letter",
    ),
    Limit("app.destinations.rabbitmq.BATCH_MAX", "messages that one RabbitMQ channel has in flight together"),
    Limit(
        "app.destinations.rabbitmq.SHORT_BYTES",
        "bytes of a RabbitMQ routing key or content type; a longer one makes the message a dead letter",
    ),
    Limit(
        "app.destinations.rabbitmq.NAME_BYTES",
        "bytes of a header's name at RabbitMQ, with `halfnote-h-`; a longer one makes the message a dead letter",
    ),
    Limit("app.destinations.redis.BATCH_MAX", "messages of one Redis pipeline"),
    Limit("app.destinations.redis.LARGEST_BYTES", "bytes of one Redis field"),
    Limit("app.store.relay.announcements.ANNOUNCE_EVERY_S", "seconds between operational messages of one cause"),
    Limit("app.announcements.TEXT_MAX", "characters of a text in an operational message; a longer one is cut"),
    Limit("app.checkback.attempts.ERROR_MAX", "characters of a stored error; a longer one is cut"),
)

PROCESSES = (
    Limit("app.database.connection.LOOP_CONNECTIONS", "pool connections that requests leave to the loops"),
    Limit(
        "app.database.keyed_share.OPEN_AGAIN_S",
        "seconds after which another connection for claims is opened if one could not be, while others are in use",
    ),
    Limit(
        "app.database.keepalive.SILENT_S",
        "seconds without an answer of the other kernel after which a TCP connection between Halfnote and the database "
        "server is lost",
    ),
    Limit(
        "app.database.connection.SILENT_IN_TRANSACTION_S",
        "seconds of silence of a process inside a database transaction after which the server ends the connection",
    ),
    Limit(
        "app.database.lent_connections.LENT_FOR_LOOKS",
        "looks, one each 10 s, at which a request or a turn of a loop may use a database connection; then it is closed",
    ),
    Limit(
        "app.database.connection.END_WITHIN_S",
        "seconds for which the server is then asked to end the process of that connection",
    ),
    Limit(
        "app.coordinator.group_commit.WAITING_FOR_STANDBY_MAX",
        "given-up connections of a commit lane that may wait for a synchronous standby; then it opens no other",
    ),
    Limit(
        "app.coordinator.group_commit.END_WITHIN_S",
        "seconds for which the server is asked to end the processes of those that do not wait for a standby",
    ),
    Limit(
        "app.store.pull.sweeps.LOOK_AGAIN_S",
        "seconds after which a worker looks again at a claim that waits for a day that is being removed",
    ),
    Limit("app.retention.loop.ANSWER_WITHIN_S", "seconds for which upkeep waits for the answer to a statement"),
    Limit(
        "app.store.retention.day_ranges.ROWS_AT_ONCE",
        "rows of a table that upkeep counts in one statement, before it removes a day",
    ),
    Limit("app.store.retention.day_ranges.PAGES_AT_ONCE", "pages of a table that it compares with the archive in one"),
    Limit(
        "app.store.retention.day_dead_letters.BODY_BYTES_AT_ONCE",
        "bytes of messages that it copies into dead letters in one statement, or one message that is larger",
    ),
    Limit("app.server.connection_limits.OTHER_FILES", "open files that a process keeps free of connections"),
    Limit(
        "app.server.known_heads.HEADS_MAX",
        "heads of requests that a process keeps instead of parsing them again",
    ),
    Limit("app.server.known_heads.HEAD_MAX_BYTES", "bytes of such a head; a longer one is parsed each time"),
    Limit(
        "app.secrets.key_file.LOOK_EVERY_S",
        "seconds after which a process has seen that the key file of the secrets changed, for sessions of the console",
    ),
    Limit("app.runtime.readiness.ANSWER_WITHIN_S", "seconds that `/readyz` gives the database"),
    Limit("app.runtime.loop_lateness.TURN_WITHIN_S", "seconds after which `/readyz` reports a loop that made no turn"),
    Limit("app.runtime.loop_runner.LONGEST_BACKOFF_S", "the longest wait of a loop after an error, in seconds"),
    Limit(
        "app.policy.server_restarts.LONGEST_WAIT_S",
        "the longest wait between two restarts of the embedded Postgres that cannot start, in seconds",
    ),
    Limit(
        "app.policy.server_restarts.LONGEST_WAIT_OF_STARTED_S",
        "the longest wait until it is restarted, in seconds, if it starts and dies again and again",
    ),
    Limit(
        "app.loops.live_settings.EVERY_S",
        "seconds between two looks at API keys and declared topics, also after an error",
    ),
    Limit(
        "app.loops.accept_switch.EVERY_S", "seconds between two looks at the switch of `/accept`, also after an error"
    ),
    Limit("app.clock.SKEW_SAID_S", "seconds of difference between the clocks above which a process logs it"),
    Limit("app.store.subscriptions.redeliveries.KEPT_DAYS", "days for which redeliveries and drops are kept at least"),
    Limit("app.store.subscriptions.dead_letters.COUNTED_MOST", "dead letters that a dry run counts"),
    Limit("app.operations.dead_letters.LOOK_S", "seconds for which a dry run of dead letters searches, and counts"),
    Limit("app.operations.dead_letters.ACT_S", "seconds after which an act on dead letters by a filter ends"),
    Limit("app.field_rules.ERROR_KIND_MAX", "characters of a kind of error"),
    Limit("app.store.subscriptions.dead_letters.GROUPED_MOST", "dead letters that `/dead-letters/groups` looks at"),
    Limit("app.runtime.standing.LAG_LOOKS_AT", "messages that a subscription's `lag` in the API counts"),
    Limit(
        "app.store.admin.figures.LOOKED_UP_MOST", "transactions of a state, and dead letters, that `/stats` looks up"
    ),
    Limit("app.store.admin.figures.COUNTED_MOST", "rows of each that `/stats` counts if there are more"),
    Limit("app.loops.minutes.KEPT_DAYS", "days for which figures by the minute are kept"),
    Limit("app.cli.api_client.TIMEOUT_S", "seconds that a command waits for an answer of the API"),
    Limit("app.cli.dead_letters.MOVED_MAX", "dead letters that one command acts on"),
)

ROCKETMQ = (
    Limit("app.rocketmq.names.TOPIC_MAX", "characters of a RocketMQ client's topic"),
    Limit("app.rocketmq.names.GROUP_MAX", "characters of its consumer group"),
    Limit("app.rocketmq.producing.MESSAGES_MAX", "messages of one request of a RocketMQ client"),
    Limit("app.rocketmq.sending.PROPERTIES_MAX", "properties of its message"),
    Limit("app.rocketmq.sending.PROPERTY_BYTES_MAX", "bytes of properties, tag and keys of its message"),
    Limit("app.rocketmq.sending.MESSAGE_GROUP_BYTES_MAX", "bytes of a message group; it must have fewer"),
    Limit("app.rocketmq.sending.RECOVERY_MAX_S", "seconds of a transaction's recovery duration"),
    Limit("app.rocketmq.filters.EXPRESSION_MAX", "characters of a RocketMQ consumer's filter expression"),
    Limit("app.rocketmq.answer_sizes.BATCH_MAX", "messages that one receive or pull brings"),
    Limit("app.rocketmq.answer_sizes.FIRST_BATCH_MAX", "messages that the first one of a client brings"),
    Limit(
        "app.rocketmq.answer_sizes.BATCH_BYTES",
        "bytes of bodies that one is to bring, by the size of those before; at least one message",
    ),
    Limit("app.rocketmq.answer_sizes.KEPT_MAX", "RocketMQ 5 clients and subscriptions of which the next size is kept"),
    Limit("app.rocketmq.consuming.INVISIBLE_LEAST_S", "seconds for which a consumer holds a message at least"),
    Limit("app.rocketmq.consuming.INVISIBLE_MOST_S", "seconds for which it holds a message at most"),
    Limit("app.rocketmq.consuming.POLL_MOST_S", "seconds for which a receive waits"),
    Limit("app.rocketmq.consuming.HANDLE_MAX", "characters of a receipt handle"),
    Limit("app.rocketmq.checks.CHECKS_MAX", "checks that a gateway claims for a topic at once"),
    Limit("app.rocketmq.checks.ANSWER_S", "seconds that a checker has for its answer, before the check comes again"),
    Limit("app.rocketmq.renewals.RENEWED_MOST_S", "seconds for which a push consumer's message is renewed"),
    Limit(
        "app.rocketmq.renewals.TRIED_AGAIN_S",
        "seconds for which it is renewed after a settlement that was refused for now",
    ),
    Limit("app.rocketmq.renewals.AT_ONCE", "requests by which a gateway renews messages at the same time"),
    Limit("app.rocketmq.clients.WAITING_MAX", "commands that wait for a client which does not read its stream"),
    Limit(
        "app.rocketmq.clients.UNORDERED_MAX",
        "push consumers of which a gateway keeps that they call their handler without order",
    ),
    Limit(
        "app.rocketmq.server.CALLS_PER_CONNECTION",
        "calls of clients that a gateway has at once, for each of `--max-connections`, and 1,000 more",
    ),
    Limit("app.rocketmq.server.STREAMS_MAX", "calls that one connection has at once; more of its calls wait"),
    Limit(
        "app.rocketmq.connection_limit.SPARE",
        "gRPC connections above `--max-connections` whose calls get `TOO_MANY_REQUESTS`; further ones are ended",
    ),
    Limit("app.rocketmq.operations_server.CONNECTIONS_MAX", "connections to a gateway's port for probes and metrics"),
    Limit("app.rocketmq.operations_server.HEAD_MAX_BYTES", "bytes of a request there"),
    Limit("app.rocketmq.claiming.HANDLES_MAX", "messages that a gateway settles with one request"),
    Limit(
        "app.rocketmq.remoting.connections.REQUESTS_MAX",
        "requests of a remoting connection without an answer, beside pulls; more are read later",
    ),
    Limit(
        "app.rocketmq.remoting.connections.PULLS_PER_TOPIC",
        "its pulls without an answer, in multiples of `--max-topics`; more get `SYSTEM_BUSY`",
    ),
    Limit(
        "app.rocketmq.remoting.connections.PULL_MAX_CHARACTERS",
        "characters of a remoting client's pull: its fields, their names and its remark",
    ),
    Limit("app.rocketmq.remoting.connections.UNREAD_MAX_BYTES", "bytes that wait for a remoting client"),
    Limit("app.rocketmq.remoting.connections.UNREAD_S", "seconds in which it takes an answer"),
    Limit("app.rocketmq.buffers.SMALL_BYTES", "bytes of a request that counts as small for `--max-buffered-bytes`"),
    Limit("app.rocketmq.remoting.sent_messages.MESSAGES_MAX", "messages of a remoting client's batch"),
    Limit("app.rocketmq.remoting.pulling.HELD_MAX", "messages of a queue that a remoting client holds"),
    Limit("app.rocketmq.remoting.pulling.POLL_MOST_S", "seconds for which a pull waits"),
    Limit("app.rocketmq.remoting.store_format.PROPERTIES_MOST_BYTES", "bytes of a message's properties for it"),
    Limit("app.rocketmq.remoting.membership.CLIENT_ID_MAX", "characters of a remoting client's id"),
    Limit(
        "app.rocketmq.remoting.sent_messages.IMMUNITY_MAX_S",
        "seconds of a remoting client's `CHECK_IMMUNITY_TIME_IN_SECONDS`",
    ),
)

SECTIONS = {
    "Requests": REQUESTS,
    "Producer groups and subscriptions": GROUPS,
    "Checks and deliveries": DELIVERY,
    "Processes and commands": PROCESSES,
    "RocketMQ clients": ROCKETMQ,
}


def value_of(limit: Limit) -> int | float:
    """Return a limit's value."""
    module, _, name = limit.constant.rpartition(".")
    value: int | float = getattr(import_module(module), name)
    return value


def page() -> str:
    """Return the whole page."""
    return HEAD + "".join(section(title, limits) for title, limits in SECTIONS.items())


def section(title: str, limits: tuple[Limit, ...]) -> str:
    """Return a table of limits."""
    rows = "".join(f"| {limit.what} | {value_of(limit):,} | `{place(limit)}` |\n" for limit in limits)
    return f"\n## {title}\n\n| limit | value | where |\n|---|--:|---|\n{rows}"


def place(limit: Limit) -> str:
    """Return the file and the name of a constant."""
    module, _, name = limit.constant.rpartition(".")
    return f"{module.replace('.', '/')}.py:{name}"


if __name__ == "__main__":
    PAGE.write_text(page())
