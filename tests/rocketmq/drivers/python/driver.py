"""Apache's client for Python: producer, transactions with a checker, a simple and a push consumer.

Run by the Python of the client's own environment. Arguments: endpoint, topic, consumer group, access key, secret. It
prints what happens as lines of JSON, and ends when the consumers have everything that is to come.
"""

import json
import sys
import threading
import time

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)

ENDPOINT, TOPIC, GROUP, ACCESS, SECRET = sys.argv[1:6]
EXPECTED = {"commit", "orphan-commit", "orphan-unknown", "plain", "fifo", "delay"}
config = ClientConfiguration(ENDPOINT, Credentials(ACCESS, SECRET))
lock = threading.Lock()
pushed = set()
asked = set()


def say(what, **fields):
    with lock:
        print(json.dumps({"what": what, **fields}), flush=True)


class Checker(TransactionChecker):
    def check(self, message):
        body = message.body.decode()
        say("checked", body=body, message_id=message.message_id, properties=dict(message.properties))
        if body == "orphan-unknown" and body not in asked:
            asked.add(body)
            return TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED
        return TransactionResolution.ROLLBACK if body == "orphan-rollback" else TransactionResolution.COMMIT


class Listener(MessageListener):
    def consume(self, message):
        body = message.body.decode()
        say("pushed", body=body, attempt=message.delivery_attempt)
        if body == "plain" and message.delivery_attempt == 1:
            return ConsumeResult.FAILURE
        pushed.add(body)
        return ConsumeResult.SUCCESS


def message(body, tag=None, keys=()):
    made = Message()
    made.topic, made.body = TOPIC, body.encode()
    if tag:
        made.tag = tag
    for key in keys:
        made.keys = key
    return made


def transaction(body):
    begun = producer.begin_transaction()
    made = message(body, "created")
    made.add_property("shop", "s1")
    say("sent", body=body, message_id=producer.send(made, begun).message_id)
    return begun


simple = SimpleConsumer(config, GROUP, {TOPIC: FilterExpression()}, await_duration=5)
simple.startup()
push = PushConsumer(config, f"{GROUP}-push", Listener(), {TOPIC: FilterExpression()})
push.startup()
producer = Producer(config, (TOPIC,), Checker())
producer.startup()
say("started")

transaction("commit").commit()
transaction("rollback").rollback()
for orphan in ("orphan-commit", "orphan-rollback", "orphan-unknown"):
    transaction(orphan)
plain = message("plain", "created", ("k1", "k2"))
plain.add_property("shop", "s1")
say("sent", body="plain", message_id=producer.send(plain).message_id)
fifo = message("fifo")
fifo.message_group = "g1"
say("sent", body="fifo", message_id=producer.send(fifo).message_id)
delay = message("delay")
delay.delivery_timestamp = int(time.time()) + 2
say("sent", body="delay", message_id=producer.send(delay).message_id)

seen = set()
end = time.time() + 90
while time.time() < end and not (seen >= EXPECTED and pushed >= EXPECTED):
    for one in simple.receive(16, 30) or ():
        body = one.body.decode()
        seen.add(body)
        say(
            "received",
            body=body,
            tag=one.tag,
            keys=sorted(one.keys),
            properties=dict(one.properties),
            message_id=one.message_id,
            attempt=one.delivery_attempt,
            group=one.message_group,
            corrupted=one.corrupted,
        )
        simple.ack(one)
say("done")
producer.shutdown()
simple.shutdown()
push.shutdown()
