"""A request for every route, with the resources that the request names."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx

from app.admission.route_roles import routes_of
from app.database.connection import Connection
from app.main import ENDPOINTS, api
from tests.conftest import register_group
from tests.support import proof_runs

ROUTES = sorted(
    {route for route in routes_of(api.router.routes) if route[0] != "HEAD"} | {("POST", path) for path in ENDPOINTS}
)
OWN, OTHER = "shop", "bank"


@dataclass(frozen=True)
class Asked:
    """A request of a route."""

    path: str
    json: dict[str, Any] | None = None
    query: dict[str, Any] = field(default_factory=dict)


@dataclass
class World:
    """Makes the resources that a request names, on one side: their names begin with the side's.

    Messages have `topic`; subscriptions take it and the side's own topic.
    """

    side: str
    admin: httpx.AsyncClient
    db: Connection
    topic: str = ""

    def __post_init__(self) -> None:
        self.topic = self.topic or f"{self.side}.order"

    def name(self) -> str:
        """A new name on this side."""
        return f"{self.side}-{uuid4().hex[:8]}"

    async def group(self) -> str:
        name = self.name()
        await register_group(self.db, name)
        return name

    async def half(self) -> tuple[str, str]:
        """A half message: its group and id."""
        group = await self.group()
        message = {"topic": self.topic, "key": "order-1030", "body": {"order": 1030}}
        answer = await self.admin.post("/half", json={"producer_group": group, "messages": [message]})
        assert answer.status_code == 201, answer.text
        return group, answer.json()["transaction_id"]

    async def ended(self, verdict: str = "commit") -> str:
        group, transaction_id = await self.half()
        end = {"transaction_id": transaction_id, "producer_group": group, "verdict": verdict}
        assert (await self.admin.post("/end", json=end)).status_code == 200
        return transaction_id

    async def in_doubt(self) -> tuple[str, str]:
        group, transaction_id = await self.half()
        await self.db.execute(
            "insert into check_back (transaction_id, producer_group, state, swept_at, next_check_at) "
            "values ($1, $2, 1, now(), now())",
            transaction_id,
            group,
        )
        return group, transaction_id

    async def subscription(self) -> str:
        name = self.name()
        topics = sorted({f"{self.side}.order", self.topic})
        put = {"topics": topics, "destination": {"type": "webhook", "url": "http://127.0.0.1:9/"}}
        assert (await self.admin.put(f"/subscriptions/{name}", json=put)).status_code == 201
        return name

    async def pulled(self) -> str:
        """A subscription whose messages consumers claim."""
        name = self.name()
        put = {"topics": sorted({f"{self.side}.order", self.topic}), "destination": {"type": "pull"}}
        assert (await self.admin.put(f"/subscriptions/{name}", json=put)).status_code == 201
        return name

    async def dead_letter(self) -> tuple[str, str]:
        """A dead letter: its subscription and message id."""
        name, transaction_id = await self.subscription(), await self.ended()
        await self.db.execute(
            'insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, attempts, reason, '
            "died_at) select s.subscription_id, o.transaction_id, 0, o.offset, o.topic, 3, 'retries_exhausted', now() "
            "from subscription s, outbox o where s.name = $1 and o.transaction_id = $2",
            name,
            transaction_id,
        )
        return name, f"{transaction_id}-0"

    async def replay(self) -> tuple[str, int]:
        name, _ = await self.subscription(), await self.ended()
        answer = await self.admin.post(f"/subscriptions/{name}/replay", json={"from": "earliest", "reason": "lost"})
        assert answer.status_code == 202, answer.text
        return name, answer.json()["replay_id"]

    async def key(self) -> int:
        answer = await self.admin.post("/api-keys", json={"name": self.name(), "role": "metrics"})
        assert answer.status_code == 201, answer.text
        return int(answer.json()["key_id"])


Builder = Callable[[World], Awaitable[Asked]]


def plain(path: str, json: dict[str, Any] | None = None) -> Builder:
    async def build(world: World) -> Asked:
        return Asked(path, json)

    return build


def of_subscription(template: str, json: dict[str, Any] | None = None) -> Builder:
    async def build(world: World) -> Asked:
        return Asked(template.format(name=await world.subscription()), json)

    return build


def of_claims(action: str, json: dict[str, Any]) -> Builder:
    """A request of a consumer; its handles are none, so the answer has an outcome that says so."""

    async def build(world: World) -> Asked:
        return Asked(f"/subscriptions/{await world.pulled()}/{action}", json)

    return build


def of_group(template: str, json: dict[str, Any] | None = None) -> Builder:
    async def build(world: World) -> Asked:
        return Asked(template.format(name=await world.group()), json)

    return build


def of_replay(template: str) -> Builder:
    async def build(world: World) -> Asked:
        name, replay_id = await world.replay()
        return Asked(template.format(name=name, replay_id=replay_id))

    return build


def of_dead_letter(path: str) -> Builder:
    async def build(world: World) -> Asked:
        subscription, message_id = await world.dead_letter()
        return Asked(path, {"ids": [{"subscription": subscription, "message_id": message_id}]})

    return build


def produce(path: str) -> Builder:
    async def build(world: World) -> Asked:
        messages = [{"topic": f"{world.side}.order", "body": 1}]
        return Asked(path, {"producer_group": await world.group(), "messages": messages})

    return build


def many(path: str, **more: str) -> Builder:
    async def build(world: World) -> Asked:
        group, _ = await world.in_doubt()
        return Asked(path, {"producer_group": group, "state": "in_doubt", "dry_run": False, **more})

    return build


async def end(world: World) -> Asked:
    """End another group's transaction in the name of one's own group: knowing the group's name is not enough."""
    _, transaction_id = await world.half()
    group = f"{OWN}-group"
    if world.side == OWN:
        group, transaction_id = await world.half()
    elif not await world.db.fetchval("select true from producer_group where name = $1", group):
        await register_group(world.db, group)
    return Asked("/end", {"transaction_id": transaction_id, "producer_group": group, "verdict": "commit"})


def together(field: str, build: Builder) -> Builder:
    """A request with one transaction in a list."""

    async def build_list(world: World) -> Asked:
        return Asked(f"/{field}", {field: [(await build(world)).json]})

    return build_list


async def claim_checks(world: World) -> Asked:
    group, _ = await world.in_doubt()
    await world.db.execute("update producer_group set checks = 'claim' where name = $1", group)
    return Asked(f"/producer-groups/{group}/checks/claim", {})


async def answer_checks(world: World) -> Asked:
    group, transaction_id = await world.in_doubt()
    answers = [{"transaction_id": transaction_id, "verdict": "commit"}]
    return Asked(f"/producer-groups/{group}/checks/answers", {"answers": answers})


async def message(world: World) -> Asked:
    return Asked(f"/messages/{await world.ended()}-0")


async def transactions(world: World) -> Asked:
    return Asked("/transactions", query={"producer_group": await world.group()})


async def transaction(world: World) -> Asked:
    return Asked(f"/transactions/{await world.ended()}")


async def attempts(world: World) -> Asked:
    return Asked(f"/transactions/{await world.ended()}/attempts")


async def deliveries(world: World) -> Asked:
    return Asked(f"/transactions/{await world.ended()}/deliveries")


async def delivery(world: World) -> Asked:
    return Asked(f"/transactions/{await world.ended()}/delivery")


async def check(world: World) -> Asked:
    return Asked(f"/transactions/{(await world.in_doubt())[1]}/check")


async def verdict(world: World) -> Asked:
    wanted = {"verdict": "rollback", "reason": "asked the bank"}
    return Asked(f"/transactions/{(await world.in_doubt())[1]}/verdict", wanted)


async def reissue(world: World) -> Asked:
    return Asked(f"/transactions/{await world.ended('rollback')}/reissue", {"reason": "it was paid"})


async def reissue_many(world: World) -> Asked:
    shown = await world.admin.get(f"/transactions/{await world.ended('rollback')}")
    wanted = {"producer_group": shown.json()["producer_group"], "reason": "they were paid", "dry_run": False}
    return Asked("/transactions/reissue", wanted)


async def put_subscription(world: World) -> Asked:
    put = {"topics": [f"{world.side}.order"], "destination": {"type": "webhook", "url": "http://127.0.0.1:9/"}}
    return Asked(f"/subscriptions/{world.name()}", put)


async def dead_letters(world: World) -> Asked:
    return Asked("/dead-letters", query={"subscription": (await world.dead_letter())[0]})


async def dead_letter_groups(world: World) -> Asked:
    return Asked("/dead-letters/groups", query={"subscription": (await world.dead_letter())[0]})


async def dead_letter(world: World) -> Asked:
    subscription, message_id = await world.dead_letter()
    return Asked(f"/dead-letters/{subscription}/{message_id}")


async def undeclare(world: World) -> Asked:
    name = world.name()
    assert (await world.admin.put(f"/topics/{name}")).status_code == 204
    return Asked(f"/topics/{name}")


async def declare(world: World) -> Asked:
    return Asked(f"/topics/{world.name()}")


async def accept(world: World) -> Asked:
    # Only a change leaves an audit row.
    now = (await world.admin.get("/accept")).json()["accept"]
    return Asked("/accept", {"accept": "ends" if now == "all" else "all"})


async def put_group(world: World) -> Asked:
    return Asked(f"/producer-groups/{world.name()}", {"check_urls": ["http://127.0.0.1:9/check"]})


async def day(world: World) -> Asked:
    await proof_runs.reconciled(world.db, "findings", proof_runs.DAY)
    return Asked(f"/reconciliation/{proof_runs.DAY}")


async def certificate(world: World) -> Asked:
    await world.db.execute("insert into day_certificate values (1, $1, 1, '{}') on conflict do nothing", proof_runs.DAY)
    return Asked(f"/reconciliation/{proof_runs.DAY}/certificate")


async def finding(world: World) -> Asked:
    return Asked(f"/findings/{await proof_runs.find(world.db, 'parked', world.name())}")


def of_key(template: str, json: dict[str, Any] | None = None) -> Builder:
    async def build(world: World) -> Asked:
        return Asked(template.format(key_id=await world.key()), json)

    return build


async def replay_to_one(world: World) -> Asked:
    name = await world.subscription()
    transaction_id = await world.ended()
    content = {"subscription": name, "reason": "the mailer lost it"}
    return Asked(f"/transactions/{transaction_id}/replay", content)


async def search(world: World) -> Asked:
    return Asked("/search", query={"q": world.name()})


async def events(world: World) -> Asked:
    return Asked("/events", query={"for_s": 0})


async def series(world: World) -> Asked:
    return Asked("/stats/series", query={"metric": "halves"})


REQUESTS: dict[tuple[str, str], Builder] = {
    ("POST", "/half"): produce("/half"),
    ("POST", "/end"): end,
    ("POST", "/messages"): produce("/messages"),
    ("POST", "/halves"): together("halves", produce("/half")),
    ("POST", "/ends"): together("ends", end),
    ("GET", "/messages/{message_id}"): message,
    ("GET", "/transactions"): transactions,
    ("GET", "/transactions/{transaction_id:uuid}"): transaction,
    ("GET", "/transactions/{transaction_id:uuid}/attempts"): attempts,
    ("GET", "/transactions/{transaction_id:uuid}/deliveries"): deliveries,
    ("GET", "/transactions/{transaction_id:uuid}/delivery"): delivery,
    ("POST", "/transactions/{transaction_id:uuid}/check"): check,
    ("POST", "/transactions/{transaction_id:uuid}/verdict"): verdict,
    ("POST", "/transactions/{transaction_id:uuid}/reissue"): reissue,
    ("POST", "/transactions/{transaction_id:uuid}/replay"): replay_to_one,
    ("POST", "/transactions/check"): many("/transactions/check"),
    ("POST", "/transactions/verdict"): many("/transactions/verdict", verdict="commit", reason="asked the bank"),
    ("POST", "/transactions/reissue"): reissue_many,
    ("GET", "/search"): search,
    ("GET", "/events"): events,
    ("GET", "/stats/series"): series,
    ("PUT", "/topics/{name}"): declare,
    ("DELETE", "/topics/{name}"): undeclare,
    ("PUT", "/accept"): accept,
    ("GET", "/producer-groups/{name}"): of_group("/producer-groups/{name}"),
    ("PUT", "/producer-groups/{name}"): put_group,
    ("PATCH", "/producer-groups/{name}"): of_group("/producer-groups/{name}", {"interval_s": 60}),
    ("DELETE", "/producer-groups/{name}"): of_group("/producer-groups/{name}"),
    ("POST", "/producer-groups/{name}/test"): of_group("/producer-groups/{name}/test"),
    ("POST", "/producer-groups/{name}/rotate-secret"): of_group("/producer-groups/{name}/rotate-secret"),
    ("POST", "/producer-groups/{name}/checks/claim"): claim_checks,
    ("POST", "/producer-groups/{name}/checks/answers"): answer_checks,
    ("GET", "/subscriptions/{name}"): of_subscription("/subscriptions/{name}"),
    ("PUT", "/subscriptions/{name}"): put_subscription,
    ("PATCH", "/subscriptions/{name}"): of_subscription("/subscriptions/{name}", {"rate_per_s": 20.0}),
    ("DELETE", "/subscriptions/{name}"): of_subscription("/subscriptions/{name}"),
    ("POST", "/subscriptions/{name}/test"): of_subscription("/subscriptions/{name}/test"),
    ("POST", "/subscriptions/{name}/pause"): of_subscription("/subscriptions/{name}/pause"),
    ("POST", "/subscriptions/{name}/resume"): of_subscription("/subscriptions/{name}/resume"),
    ("POST", "/subscriptions/{name}/reset-breaker"): of_subscription("/subscriptions/{name}/reset-breaker"),
    ("GET", "/subscriptions/{name}/recent"): of_subscription("/subscriptions/{name}/recent"),
    ("POST", "/subscriptions/{name}/rotate-secret"): of_subscription("/subscriptions/{name}/rotate-secret"),
    ("POST", "/subscriptions/{name}/claim"): of_claims("claim", {"max": 1}),
    ("POST", "/subscriptions/{name}/ack"): of_claims("ack", {"handles": ["none"]}),
    ("POST", "/subscriptions/{name}/nack"): of_claims("nack", {"handles": ["none"]}),
    ("POST", "/subscriptions/{name}/extend"): of_claims("extend", {"handles": ["none"], "invisible_s": 60}),
    ("POST", "/subscriptions/{name}/reject"): of_claims("reject", {"handles": ["none"]}),
    ("POST", "/subscriptions/{name}/replay"): of_subscription(
        "/subscriptions/{name}/replay", {"from": "earliest", "reason": "lost"}
    ),
    ("GET", "/subscriptions/{name}/replays"): of_subscription("/subscriptions/{name}/replays"),
    ("GET", "/subscriptions/{name}/replays/{replay_id}"): of_replay("/subscriptions/{name}/replays/{replay_id}"),
    ("DELETE", "/subscriptions/{name}/replays/{replay_id}"): of_replay("/subscriptions/{name}/replays/{replay_id}"),
    ("GET", "/dead-letters"): dead_letters,
    ("GET", "/dead-letters/groups"): dead_letter_groups,
    ("GET", "/dead-letters/{subscription}/{message_id}"): dead_letter,
    ("POST", "/dead-letters/redeliver"): of_dead_letter("/dead-letters/redeliver"),
    ("DELETE", "/dead-letters"): of_dead_letter("/dead-letters"),
    ("GET", "/reconciliation/{day}"): day,
    ("GET", "/reconciliation/{day}/certificate"): certificate,
    ("GET", "/findings/{finding_id}"): finding,
    ("GET", "/findings/kinds/{kind}"): plain("/findings/kinds/parked"),
    ("POST", "/api-keys"): plain("/api-keys", {"name": "grafana", "role": "metrics"}),
    ("GET", "/api-keys/{key_id}"): of_key("/api-keys/{key_id}"),
    ("PUT", "/api-keys/{key_id}"): of_key("/api-keys/{key_id}", {"name": "grafana", "role": "metrics"}),
    ("POST", "/api-keys/{key_id}/rotate"): of_key("/api-keys/{key_id}/rotate", {}),
    ("DELETE", "/api-keys/{key_id}"): of_key("/api-keys/{key_id}"),
    ("GET", "/problems/{slug}"): plain("/problems/forbidden"),
}
# A route without parameters needs nothing but its path.
REQUESTS |= {route: plain(route[1]) for route in ROUTES if route not in REQUESTS}
