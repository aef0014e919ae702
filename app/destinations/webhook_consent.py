"""Ask a webhook for its consent to deliveries (CloudEvents' HTTP webhooks 1.0.2 §4, "abuse protection").

It keeps Halfnote from sending to a receiver that does not expect it. A receiver that consented gets
`WebHook-Request-Origin` with each delivery.
"""

from dataclasses import dataclass

from app.egress.http_client import EgressClient
from app.egress.reply import Reply

ANY = "*"


@dataclass(frozen=True, slots=True)
class Consent:
    """The receiver's consent. `rate_per_min`: the most requests a minute, None without a limit."""

    rate_per_min: int | None


async def consent(
    client: EgressClient, url: str, origin: str, rate_per_min: int | None, timeout_s: float
) -> Consent | str:
    """Ask a webhook's URL with OPTIONS whether `origin` may send to it; return its consent, or why it gives none.

    `rate_per_min`: the requested rate, None for no limit; the consent may be to a lower one.
    """
    asked = {"webhook-request-origin": origin}
    if rate_per_min is not None:
        asked["webhook-request-rate"] = str(rate_per_min)
    return consent_of(await client.call(url, b"", asked, timeout_s=timeout_s, method="OPTIONS"), origin)


def consent_of(reply: Reply, origin: str) -> Consent | str:
    """Return the consent in an answer. The status does not count: many servers answer 200 to OPTIONS (§4.2)."""
    if reply.status is None:
        return f"did not answer to OPTIONS: {reply.error}"
    allowed = reply.headers.get("webhook-allowed-origin", "").strip()
    if not allowed:
        return f"answered {reply.status} to OPTIONS, without WebHook-Allowed-Origin: it does not consent to deliveries"
    if allowed != ANY and allowed.lower() != origin.lower():
        return f"consents to deliveries of `{allowed[:200]}`, not of `{origin}` (HALFNOTE_ORIGIN)"
    rate = reply.headers.get("webhook-allowed-rate", "").strip()
    if rate in ("", ANY):
        return Consent(None)
    if not (rate.isascii() and rate.isdigit() and int(rate[:9])):
        return (
            f"answered to OPTIONS with a WebHook-Allowed-Rate of `{rate[:200]}`: a number above zero or `*` is wanted"
        )
    return Consent(int(rate[:9]))
