"""Apache's client for Python: producer, transactions with a checker, a simple consumer, and two push consumers.

Run by the Python of the client's own environment. Arguments: endpoint, topic, consumer group, access key, secret, and
the seconds for which it stays. The group `…-fifo` is ordered. It prints what happens as lines of JSON, and ends that
many seconds after the consumers have everything that is to come.
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

ENDPOINT, TOPIC, GROUP, ACCESS, SECRET, STAYS_S = sys.argv[1:7]
IN_ORDER = {"fifo-0", "fifo-1", "fifo-2"}
DONE = {"commit", "orphan-commit", "orphan-unknown", "plain", "delay", *IN_ORDER}
POISON_ATTEMPTS = 2
config = ClientConfiguration(ENDPOINT, Credentials(ACCESS, SECRET))
lock = threading.Lock()
pushed = set()
ordered = set()
failed = {"pushed": 0, "ordered": 0}
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
        return TransactionResolution.ROLLBACK if body.endswith("rollback") else TransactionResolution.COMMIT


class Listener(MessageListener):
    def consume(self, message):
        body = message.body.decode()
        say("pushed", body=body, attempt=message.delivery_attempt)
        if body == "poison":
            failed["pushed"] += 1
            return ConsumeResult.FAILURE
        if body == "plain" and message.delivery_attempt == 1:
            return ConsumeResult.FAILURE
        pushed.add(body)
        return ConsumeResult.SUCCESS


class InOrder(MessageListener):
    def consume(self, message):
        body = message.body.decode()
        say("ordered", body=body)
        if body == "poison":
            failed["ordered"] += 1
            return ConsumeResult.FAILURE
        if body == "fifo-1" and body not in asked:
            asked.add(body)
            return ConsumeResult.FAILURE
        ordered.add(body)
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
fifo = PushConsumer(config, f"{GROUP}-fifo", InOrder(), {TOPIC: FilterExpression()})
fifo.startup()
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
for body, group in (("fifo-0", "g1"), ("fifo-1", "g1"), ("fifo-2", "g1"), ("poison", "g2")):
    grouped = message(body)
    grouped.message_group = group
    say("sent", body=body, message_id=producer.send(grouped).message_id)
delay = message("delay")
delay.delivery_timestamp = int(time.time()) + 2
say("sent", body="delay", message_id=producer.send(delay).message_id)

seen = set()
end = time.time() + 90


def has_all():
    poisoned = min(failed.values()) >= POISON_ATTEMPTS
    return poisoned and seen >= DONE | {"poison"} and pushed >= DONE and ordered >= IN_ORDER


while time.time() < end and not has_all():
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
time.sleep(float(STAYS_S))
say("done")
producer.shutdown()
simple.shutdown()
push.shutdown()
fifo.shutdown()
