"""Checks that a producer claims instead of being called: what is claimed, how it is answered, in which order."""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import quote

from halfnote.check import EACH_WITHIN_S, checked
from halfnote.conversation import Conversation
from halfnote.errors import Unconfirmed
from halfnote.exchange import Call, Exchange, Raised, Request, asked
from halfnote.listener import CheckListener
from halfnote.verdicts import Verdict

log = logging.getLogger("halfnote")

# Checks of one claim. A claim of more would hold back checks that another process could answer.
MOST = 100
# The time to answer them, and the part of it after which no further check is looked at.
INVISIBLE_S = 60
LOOKED_AT_WITHIN = 0.8
# Answers are posted at least this often while the listener is slow.
POST_EVERY_S = 5.0
# The waits after a claim that failed, and the longest one that an answer may ask for.
FIRST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_OBEYED_S = 1.0, 30.0, 3600.0


@dataclass(frozen=True)
class Claiming:
    """The part of a producer that answers checks by `listener`. `clock` and `wall`: seconds, the latter since 1970."""

    conversation: Conversation
    listener: CheckListener
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time

    def claimed(self, wait_s: int, *, started: bool) -> Exchange[list[Mapping[str, Any]]]:
        """Claim checks; wait up to `wait_s` if none is due. Raises Refused or Unconfirmed."""
        content = {"max": MOST, "invisible_s": INVISIBLE_S, "wait_s": wait_s, "started": started}
        timeout_s = wait_s + self.conversation.attempt_s
        request = self._post("claim", content, timeout_s)
        answer = yield from asked("a claim of checks", request, within_s=timeout_s, clock=self.clock, attempts=1)
        checks: list[Mapping[str, Any]] = list(answer.content.get("checks", ()))
        return checks

    def answered(self, checks: Sequence[Mapping[str, Any]]) -> Exchange[int]:
        """Answer claimed checks; return how many. What fails, or takes too long, is left: Halfnote asks again.

        Raises Refused or Unconfirmed if the answers could not be posted.
        """
        began = posted_at = self.clock()
        answers: list[dict[str, Any]] = []
        count = 0
        for check in checks:
            if self.clock() - began > INVISIBLE_S * LOOKED_AT_WITHIN:
                log.warning("%d claimed checks took too long and are left to a later claim", len(checks) - count)
                break
            # A local transaction that stays open for long must not hold up the answers to the others.
            within_s = EACH_WITHIN_S if len(checks) > 1 else None
            answer = yield from self._verdict(check, within_s)
            if answer is not None:
                answers.append(answer)
                count += 1
            if answers and self.clock() - posted_at > POST_EVERY_S:
                yield from self._posted(answers)
                answers, posted_at = [], self.clock()
        if answers:
            yield from self._posted(answers)
        return count

    def _verdict(self, check: Mapping[str, Any], within_s: float | None) -> Exchange[dict[str, Any] | None]:
        """Ask the listener; None if it has no answer now. `within_s`: for the listener's own waits."""
        transaction = replace(checked(check, self.wall()), within_s=within_s)
        came = yield Call(partial(self.listener.check_local, transaction), waits=True)
        if isinstance(came, Raised):
            log.error("check of transaction %s failed", transaction.transaction_id, exc_info=came.error)
            return None
        if not isinstance(came.value, Verdict):
            log.error(
                "check_local returned %r for transaction %s; it must return COMMIT, ROLLBACK or UNKNOWN",
                came.value,
                transaction.transaction_id,
            )
            return None
        log.info("check %d of transaction %s: %s", transaction.check, transaction.transaction_id, came.value.value)
        return {
            "transaction_id": str(transaction.transaction_id),
            "handle": check["handle"],
            "verdict": came.value.value,
        }

    def _posted(self, answers: list[dict[str, Any]]) -> Exchange[None]:
        conversation = self.conversation
        request = self._post("answers", {"answers": answers}, conversation.attempt_s)
        within_s = min(conversation.end_within_s, INVISIBLE_S)
        answer = yield from asked("answers to checks", request, within_s=within_s, clock=self.clock)
        for said, outcome in zip(answers, answer.content.get("outcomes", ()), strict=False):
            if outcome.get("status", 200) >= 300:
                log.warning("transaction %s: %s", said["transaction_id"], outcome.get("detail") or outcome.get("type"))

    def _post(self, act: str, content: Mapping[str, Any], timeout_s: float) -> Request:
        group = quote(self.conversation.group, safe="")
        return Request("POST", f"/producer-groups/{group}/checks/{act}", json.dumps(content).encode(), timeout_s)


def paused_s(failed: int, error: Exception) -> float:
    """Return how long to wait after so many claims in a row that failed, the last one with `error`."""
    asked_s = error.after_s if isinstance(error, Unconfirmed) else 0.0
    return max(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failed - 1, 10)), min(asked_s, LONGEST_OBEYED_S))
