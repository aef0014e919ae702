"""The Python client of Halfnote: transactional messages over HTTP, for services with a database of their own."""

from halfnote.check import CheckEndpoint
from halfnote.check_answering import CheckAnswering, SyncCheckAnswering
from halfnote.consumer import Consumer
from halfnote.errors import (
    BarrierRefused,
    HalfFailed,
    HalfnoteError,
    ListenerError,
    NotCommitted,
    NotEntered,
    PlainFailed,
    Problem,
    ProducerClosed,
    Refused,
    Unconfirmed,
    VerdictConflict,
)
from halfnote.listener import CheckedMessage, CheckedTransaction, CheckListener, TransactionListener
from halfnote.many import Half
from halfnote.outgoing import Outgoing
from halfnote.producer import TransactionProducer
from halfnote.signatures import SignatureError, Verifier
from halfnote.sync_consumer import SyncConsumer
from halfnote.sync_producer import SyncTransactionProducer
from halfnote.tracing import traceparent
from halfnote.transaction import PlainResult, Registration, Transaction, TransactionResult
from halfnote.verdicts import COMMIT, ROLLBACK, UNKNOWN, Verdict

__version__ = "0.1.0"

__all__ = [
    "COMMIT",
    "ROLLBACK",
    "UNKNOWN",
    "BarrierRefused",
    "CheckAnswering",
    "CheckEndpoint",
    "CheckListener",
    "CheckedMessage",
    "CheckedTransaction",
    "Consumer",
    "Half",
    "HalfFailed",
    "HalfnoteError",
    "ListenerError",
    "NotCommitted",
    "NotEntered",
    "Outgoing",
    "PlainFailed",
    "PlainResult",
    "Problem",
    "ProducerClosed",
    "Refused",
    "Registration",
    "SignatureError",
    "SyncCheckAnswering",
    "SyncConsumer",
    "SyncTransactionProducer",
    "Transaction",
    "TransactionListener",
    "TransactionProducer",
    "TransactionResult",
    "Unconfirmed",
    "Verdict",
    "VerdictConflict",
    "Verifier",
    "traceparent",
]
