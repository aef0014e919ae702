"""The schemas of the frames, by name and type, for Postgres, Parquet and tests.

Times are UTC. Ids are strings in canonical form, lower case. A jsonb column of Postgres is a string of JSON. Numbers
for names are those of the service. op.verdict: 1 commit, 2 rollback. op.source: 0 producer, 1 check, 2 policy, 3
operator. check_back.state: 1 in doubt, 2 parked. replay: 0 live, else the replay's id.
"""

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    DoubleType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

_TYPES: dict[str, DataType] = {
    "string": StringType(),
    "short": ShortType(),
    "int": IntegerType(),
    "long": LongType(),
    "double": DoubleType(),
    "binary": BinaryType(),
    "time": TimestampType(),
    "date": DateType(),
    "strings": ArrayType(StringType()),
    "ints": ArrayType(IntegerType()),
}


def _schema(columns: str) -> StructType:
    """Parse lines of the form `type name, name …` into a schema; a name with `!` is never null."""
    fields = []
    for line in columns.strip().splitlines():
        kind, names = line.split(maxsplit=1)
        fields += [(name.rstrip("!"), _TYPES[kind], not name.endswith("!")) for name in names.split(", ")]
    return StructType([StructField(*field) for field in fields])


# Columns that no rule, figure or certificate needs are left out, because each would be read for every row of the day.

# A message from its producer; only position 0 has a `digest`, and a `policy` if the
# producer gave one.
HALF = _schema("""
string transaction_id!
short position!
string producer_group!, topic!, tag, headers
binary body_digest!, digest
time born_at!, first_check_at!
string policy
""")

OP = _schema("""
string transaction_id!
short verdict!, source!
string actor, reason
time decided_at!
""")

OUTBOX = _schema("""
string transaction_id!
short position!
long offset!
string topic!, key, tag
time due_at, committed_at!
""")

# A settled delivery. `digest`: the digest of the sent body.
RECEIPT = _schema("""
string transaction_id!
short position!
int subscription_id!
long offset!
string outcome!
int attempts!
time first_at!
int duration_ms!, status
binary digest
time settled_at!
int replay!
""")

ATTEMPT = _schema("""
string transaction_id!
string kind!
time at!
int number
string outcome!
""")

CHECK_BACK = _schema("""
string transaction_id!, producer_group!
short state!
time swept_at!
int asked!, answered!, unanswered!
time unanswered_since, next_check_at, parked_at
string parked_reason
""")

DELIVERY_RETRY = _schema("""
int subscription_id!, replay!
string transaction_id!
short position!
long offset!
string topic!, key
int attempts!
time due_at!
""")

DEAD_LETTER = _schema("""
int subscription_id!, replay!
string transaction_id!
short position!
long offset!
string topic!, key
int attempts!
string reason!
time died_at!
""")

# A person's action on a dead letter: redelivered or dropped.
REDELIVERY = _schema("""
int subscription_id!, replay!
string transaction_id!
short position!
string what!
time at!
""")

SUBSCRIPTION = _schema("""
int subscription_id!
string name!
strings topics!
string filters, state!
long started_after!
time matches_since!, created_at!, deleted_at
""")

# One version of a subscription, in force from `at` on. Rows are never changed. `shards` null: unknown.
SUBSCRIPTION_VERSION = _schema("""
long version_id!
int subscription_id!
time at!
string name!
strings topics!
string filters, state!, ordered!
int shards
long started_after!
time deleted_at
""")

CHECKPOINT = _schema("""
int subscription_id!, shards!, shard!
long offset!
""")

PRODUCER_GROUP = _schema("""
string name!
int interval_s!, max_checks!, unanswered_park_s!
string on_exhausted!
""")

# A disagreement. (day, kind, subject) is unique; `detail` is a JSON object.
FINDING = _schema("""
date day!
string kind!, subject!, transaction_id
short position
int subscription_id
string producer_group, detail!
""")

# The verdict in a producer's own database: commit or rollback. `end_decided_at`: as the answer to its end said, null if
# the producer has not kept it; `end_reason`: what its end said, empty for no reason, null if the ledger does not say.
PRODUCER_LEDGER = _schema("""
string transaction_id!, verdict!
time end_decided_at
string end_reason
""")

# A message that a consumer received, and how often; `subscription` is a name, or null for any. `answered`: the HTTP
# statuses that the consumer answered with, empty if the ledger does not say.
CONSUMER_LEDGER = _schema("""
string message_id!
long times_seen!
string subscription
ints answered
""")

# The messages in a day's archive.
ARCHIVE = _schema("""
string transaction_id!
short position!
binary body_digest!
""")

# A message of another day at an offset that a message of the day also has.
SAME_OFFSET = _schema("""
string transaction_id!
short position!
long offset!
""")

# A transaction that several installations have, by their names.
SHARED = _schema("""
string transaction_id!
strings installations!
""")

# A transaction whose half is not the one that was posted: the stored digest, that of the stored content, and the names
# of what differs (null: of an older version).
ALTERED = _schema("""
string transaction_id!, producer_group!, digest, computed!, differs
""")

# A message that differs from its half, or whose times disagree. `differs`: the names of the outbox's columns; `times`:
# what is wrong with the times; each empty if there is nothing.
DIFFERING = _schema("""
string transaction_id!
short position!
string producer_group!
long offset
string differs!, times
""")

# A receipt that the relay cannot have written; `differs`: the names of what is wrong.
WRONG_RECEIPT = _schema("""
string transaction_id!
short position!
int subscription_id!, replay!
long offset!
string differs!
""")

# A retry, dead letter or drop (`what`) that the service cannot have written; `differs`: the names of what is wrong.
WRONG_DELIVERY = _schema("""
string transaction_id!
short position!
int subscription_id!, replay!
long offset!
string what!, differs!
""")

# A subscription whose row is not as its last version says (`differs`), or whose checkpoint is impossible
# (`checkpoint`); each empty if there is nothing.
DIFFERING_SUBSCRIPTION = _schema("""
int subscription_id!
string name!, differs!, checkpoint!
""")

# A subscription with retries that are due later than the relay plans them: their number, and the message and due time
# of the last one.
NEVER_DUE = _schema("""
int subscription_id!
string name!
long retries!
string last!, due_at!
""")

# A retry of an ordered subscription that is the next message of its key, and since when nothing has kept it back.
READY_RETRY = _schema("""
string transaction_id!
short position!
int subscription_id!, replay!
long offset!
time ready_at!
""")

# A receipt of an ordered subscription whose message was sent before the previous one of its key was settled: the offset
# of that one, and when it was settled.
OUT_OF_ORDER = _schema("""
string transaction_id!
short position!
int subscription_id!, replay!
long offset!, before_offset!
string first_at!, before_at!
""")

# A verdict that lacks the evidence of its source, or evidence without its verdict. `answers`: the number of checks that
# were answered `unknown`; `differs`: the names of what is missing.
WITHOUT_EVIDENCE = _schema("""
string transaction_id!, producer_group
short verdict, source
long answers!
string differs!
""")

# A replay that is over and lacks receipts: of how many messages of the day, the first of them, and its offset.
REPLAY_INCOMPLETE = _schema("""
int subscription_id!, replay_id!
string name!
long messages!
string first!
long offset!
""")

# A replay that runs and still has to read messages of the day.
REPLAYING = _schema("""
int subscription_id!, replay_id!
string name!
""")

# A break of the audit's chain: at a row, or `head`; the row's place and that of the row before it.
AUDIT_BROKEN = _schema("""
string subject!
long audit_id, place, before_place
string differs!
""")

# A subscription with late deliveries: how many messages, the id and offset of the first, and since when they are due.
LATE = _schema("""
int subscription_id!
string name!
long messages!
string first!
long offset!
time due_from!
""")

# The refused ends of a producer group: how many, and the first few transactions.
REFUSED = _schema("""
string producer_group!
long refused!
strings transactions!
""")

# The messages of a topic that no subscription ever took: how many, and the id and offset of the first.
UNTAKEN = _schema("""
string topic!
long messages!
string first!
long offset!
""")

# By the names of the frames (spark/frames.py). The first five are the day's own tables, which are partitioned by day.
BIG = {"half": HALF, "op": OP, "outbox": OUTBOX, "receipt": RECEIPT, "attempt": ATTEMPT}
OF_DAY = {
    "check_back": CHECK_BACK,
    "delivery_retry": DELIVERY_RETRY,
    "dead_letter": DEAD_LETTER,
    "redelivery": REDELIVERY,
}
WHOLE = {
    "subscription": SUBSCRIPTION,
    "subscription_version": SUBSCRIPTION_VERSION,
    "checkpoint": CHECKPOINT,
    "producer_group": PRODUCER_GROUP,
}
FRAMES = BIG | OF_DAY | WHOLE
# Columns of a read's files that no frame has: the search in files compares them (spark/transforms/screen/compared.py).
ALSO = {
    "half": _schema("""
string key
double deliver_after_s
""")
}
# What the read found; frames.json has the number of rows by these names.
FOUND = {
    "altered": ALTERED,
    "differing": DIFFERING,
    "wrong_receipt": WRONG_RECEIPT,
    "wrong_delivery": WRONG_DELIVERY,
    "differing_subscription": DIFFERING_SUBSCRIPTION,
    "never_due": NEVER_DUE,
    "ready_retry": READY_RETRY,
    "out_of_order": OUT_OF_ORDER,
    "audit_broken": AUDIT_BROKEN,
    "replay_incomplete": REPLAY_INCOMPLETE,
    "replaying": REPLAYING,
    "without_evidence": WITHOUT_EVIDENCE,
}
