"""The mark of a half whose block enters the barrier by itself, so that a missing row proves that nothing was committed.

The mark is part of the half's context, which Halfnote stores and sends with every check: `{"halfnote_barrier": true,
"context": …}`. Without the mark, the code of a block can have committed without `barrier.enter`, so a missing row
proves nothing.
"""

from typing import Any

MARK = "halfnote_barrier"


def marked(context: Any) -> dict[str, Any]:
    """Return the context of a half whose block enters the barrier by itself. `context`: the caller's, or None."""
    return {MARK: True} if context is None else {MARK: True, "context": context}


def unmarked(context: Any) -> tuple[bool, Any]:
    """Return whether a context has the mark, and the caller's context."""
    if isinstance(context, dict) and context.get(MARK) is True and context.keys() <= {MARK, "context"}:
        return True, context.get("context")
    return False, context
