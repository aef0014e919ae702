"""The report: what it says at the top, what it lists, what it draws, and that nothing in it comes from elsewhere."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from html.parser import HTMLParser
from typing import Any

import pytest

from app.finding_kinds import MEANINGS as SERVICE_MEANINGS
from app.finding_kinds import docs_of
from spark.proof.store_results import Written
from spark.report.charts import DRAWN_SUBSCRIPTIONS, duration, of_day, of_scores, of_trend, within
from spark.report.finding_texts import MEANINGS, NAMES, name_of_kind
from spark.report.installations import Part, render_all
from spark.report.page import DRAWN_DAYS, MOST_ROWS, NAMED_DAYS, details, render
from spark.transforms.figures import FROM_MS, MOST_ATTEMPTS, MOST_CHECKS, OUTCOMES, QUARTERS, SOURCES, bucket_of
from spark.transforms.rules import RULES

DAY = date(2026, 11, 20)
ENDED = datetime(2026, 11, 21, 2, 14, 7, tzinfo=UTC)
ID = "019aa5a3-7e4c-7b1e-8f00-1030a1030a10"
URL = "https://halfnote.example:8443"
EVIL = "<script>alert(1)</script>"


def run(**others: Any) -> dict[str, Any]:
    when = {"seen_at": ENDED, "started_at": ENDED - timedelta(seconds=57.3), "ended_at": ENDED}
    counts = {"open": 0, "new": 0, "resolved": 0}
    usual = {"run_id": 412, "state": "proved", "engine": "local[2]", "source": "standby", "days": [DAY], "error": None}
    return usual | when | counts | {"seconds": {"read": 21.4, "join": 0.0}} | others


def figures(**others: Any) -> dict[str, Any]:
    nothing = {
        "outcomes": {name: [0] * QUARTERS for name in OUTCOMES},
        "from_s": [ms / 1000 for ms in FROM_MS],
        "verdict": {name: [0] * len(FROM_MS) for name in SOURCES},
        "checks": [0] * (MOST_CHECKS + 1),
    }
    return nothing | {"subscriptions": [], "others": None, "latency_of_one_in": 1} | others


def counted(length: int, counts: Mapping[int, int]) -> list[int]:
    return [counts.get(place, 0) for place in range(length)]


def subscription(name: str | None, **others: Any) -> dict[str, Any]:
    lists = {
        "attempts": counted(MOST_ATTEMPTS, {0: 990, 1: 10}),
        "latency": counted(len(FROM_MS), {bucket_of(0.02): 600, bucket_of(3): 400}),
    }
    numbers = {"delivered": 1000, "dropped": 0, "waiting": 0, "dead": 0}
    return {"subscription_id": 7, "name": name} | numbers | lists | others


def busy(**others: Any) -> dict[str, Any]:
    outcomes = {name: counted(QUARTERS, {40: 1000 if name == "committed" else 3}) for name in OUTCOMES}
    verdict = {name: counted(len(FROM_MS), {bucket_of(0.05): 500}) for name in SOURCES}
    checks = counted(MOST_CHECKS + 1, {0: 900, 1: 90, 7: 10})
    return figures(**{"outcomes": outcomes, "verdict": verdict, "checks": checks, **others})


def day(of: date = DAY, found: Mapping[str, int] | None = None, **others: Any) -> dict[str, Any]:
    usual = {"run_id": 412, "state": "provisional", "reconciled_at": ENDED, "signature": {}, "figures": figures()}
    return {"day": of, "counts": {"half": 1009}, "found": dict(found or {})} | usual | others


def finding(kind: str, **others: Any) -> dict[str, Any]:
    place = {"day": DAY, "kind": kind, "subject": ID, "transaction_id": ID, "position": None}
    whose = {"subscription_id": None, "producer_group": "shop", "detail": {"missing": [1, 2]}}
    runs = {"first_run": 400, "last_run": 412, "resolved_run": None, "resolved_at": None}
    return {"finding_id": 1} | place | whose | runs | {"first_seen_at": ENDED, "last_seen_at": ENDED} | others


class Page(HTMLParser):
    """What is in a page: its words, tags, links, and the rows of its tables."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.html = html
        self._words: list[str] = []
        self.feed(html)
        self.text = " ".join(" ".join(self._words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("href", "src", "action", "xlink:href"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] != ["style"]:
            self._words.append(data)


def page(
    given: Mapping[str, Any],
    days: Sequence[Mapping[str, Any]] = (),
    findings: Sequence[Mapping[str, Any]] = (),
    trend: Sequence[Mapping[str, Any]] = (),
    elsewhere: Mapping[date, int] | None = None,
    base_url: str | None = URL,
) -> Page:
    return Page(render(given, days, findings, trend, elsewhere or {}, base_url=base_url))


def test_a_proved_day_says_so_first() -> None:
    made = page(run(), [day(figures=busy())])
    assert made.text.startswith("Proved · Halfnote, 2026-11-21 02:14:07 UTC Halfnote: nightly proof of 2026-11-20")
    assert "✓ Proved The verdicts of transactions" in made.text
    assert made.links[:2] == [f"{URL}/reconciliation", f"{URL}/findings?state=open"]
    assert "on 1 day." in made.text
    for said in ("412", "57.3 s", "standby", "local[2]", "read 21.4 s, join under 1 ms", "2026-11-20 provisional ✓ 0"):
        assert said in made.text
    assert "Findings" not in made.text


def test_a_run_that_had_nothing_to_look_at_is_proved() -> None:
    made = page(run(days=[]))
    assert "No day changed since the last run" in made.text
    assert "svg" not in made.tags


def test_what_is_open_of_days_that_were_not_looked_at_is_named_at_the_top() -> None:
    before = {DAY - timedelta(days=number): number for number in range(4, 4 + NAMED_DAYS + 2)}
    made = page(run(), [day()], elsewhere=before)
    assert made.text.index("✓ Proved, except for 114 earlier findings") < made.text.index("412")
    assert "Still open, of days that this run did not look at: 2026-11-16 (4), 2026-11-15 (5)," in made.text
    assert "2026-11-07 (13) and 2 more days." in made.text
    assert f"{URL}/findings?day=2026-11-16&state=open" in made.links
    found = page(run(state="findings", open=1), [day(found={"parked": 1})], [finding("parked")], elsewhere={DAY: 1})
    assert "Still open, of days that this run did not look at: 2026-11-20 (1)." in found.text
    assert "earlier finding" not in found.text


def test_a_failed_run_says_why_and_proves_nothing() -> None:
    made = page(run(state="failed", error="The database is gone", seen_at=None))
    assert made.text.startswith("Run failed")
    assert "! The run failed The database is gone Nothing was proved" in made.text
    assert "✓" not in made.text


def test_findings_are_counted_listed_and_explained_by_kind() -> None:
    named = {"subscription_id": 3, "subscription": "points/eu"}
    rows = [finding("undelivered", subject=f"{ID}-0:3", **named), finding("parked", first_run=412)]
    found = {"undelivered": 1, "parked": 1}
    made = page(run(state="findings", open=2, new=1), [day(found=found)], rows)
    assert "✕ 2 findings 1 new, 0 resolved" in made.text
    assert "1 not delivered undelivered 1 waits for a person parked" in made.text
    assert made.text.index("Not delivered undelivered · 1 ") < made.text.index("Waits for a person parked · 1, 1 new")
    assert re.search(rf"{ID} new day 2026-11-20 group shop missing 1, 2 since 2026-11-21", made.text)
    assert re.search(rf"{ID}-0 day 2026-11-20 group shop subscription points/eu \(3\) missing", made.text)
    assert f"{URL}/subscriptions/points%2Feu" in made.links
    assert MEANINGS["parked"][0].replace("`", "") in made.text
    assert {f"{URL}/transactions/{ID}", f"{URL}/findings/kinds/parked", f"{URL}/reconciliation/2026-11-20"} < set(
        made.links
    )


def test_a_subscription_without_a_name_has_its_number() -> None:
    given = run(state="findings", open=1), [day(found={"undelivered": 1})]
    for row in (
        finding("undelivered", subscription_id=3),
        finding("undelivered", subscription_id=3, subscription=None),
    ):
        made = page(*given, [row])
        assert "group shop subscription 3 missing" in made.text
        assert not [link for link in made.links if "/subscriptions/" in link]
    unlinked = page(*given, [finding("undelivered", subscription_id=3, subscription="points")], base_url=None)
    assert "subscription points (3)" in unlinked.text


def test_what_has_a_column_or_a_word_of_its_own_is_not_shown_as_a_number() -> None:
    one = f"{ID}-0"
    delivery = finding("undelivered", subject=f"{one}:7", subscription_id=7, detail={"name": "mailer", "source": 3})
    verdict = finding("op_without_half", detail={"verdict": 2, "source": 0, "offset": 2, "seen": [{"source": 1}]})
    made = page(run(state="findings"), [day()], [delivery | {"subscription": "mailer"}, verdict])
    assert f"{one} day 2026-11-20" in made.text
    assert f"{one}:7" not in made.text
    assert "mailer (7) source operator" in " ".join(made.text.split())
    assert "verdict rollback source producer offset 2 seen source check" in " ".join(made.text.split())
    # Without the subscription's name, its number is what there is.
    assert f"{one}:7" in page(run(state="findings"), [day()], [delivery]).text


def test_ids_in_details_are_links_and_empty_columns_are_left_out() -> None:
    other = ID.replace("1030a10", "1030a11")
    found = finding("offset_of_two_messages", subject="863", transaction_id=None, producer_group=None)
    found |= {"detail": {"messages": [f"{ID}-0", f"{other}-12"], "text": f"<b>{EVIL}"}, "subscription_id": None}
    made = page(run(state="findings"), [day()], [found])
    assert {f"{URL}/transactions/{ID}", f"{URL}/transactions/{other}"} <= set(made.links)
    assert "script" not in made.tags
    assert EVIL in made.text
    assert "subject day detail first seen" in " ".join(made.text.split())
    assert not [link for link in page(run(state="findings"), [day()], [found], base_url=None).links if link[0] != "#"]


def test_kinds_have_names_for_people() -> None:
    assert set(NAMES) <= set(MEANINGS)
    assert all(name_of_kind(kind)[0].islower() and "_" not in name_of_kind(kind) for kind in MEANINGS)
    assert len({name_of_kind(kind) for kind in MEANINGS}) == len(MEANINGS)
    assert name_of_kind("retry_overdue") == "retry overdue"


def test_of_many_findings_it_says_how_many_more_there_are() -> None:
    rows = [finding("parked", subject=f"number-{number}") for number in range(MOST_ROWS + 5)]
    made = page(run(state="findings", open=300), [day(found={"parked": 5000})], rows)
    assert "✕ 5,000 findings" in made.text
    assert f"number-{MOST_ROWS - 1} " in made.text
    assert f"number-{MOST_ROWS} " not in made.text
    assert "And 4,800 more: halfnote findings list --kind parked" in made.text


def test_a_finding_of_one_kind_on_several_days_is_counted_once_a_day() -> None:
    days = [day(found={"parked": 2}), day(DAY - timedelta(days=1), {"parked": 1})]
    made = page(run(state="findings", open=3), days, [finding("parked", subject=name) for name in "abc"])
    assert "parked · 3" in made.text
    assert "more" not in made.text.split("parked · 3")[1].split("What happened")[0]


def test_what_is_resolved_is_no_finding() -> None:
    gone = finding("parked", resolved_run=412, resolved_at=ENDED)
    made = page(run(resolved=1), [day()], [gone])
    assert "✓ Proved" in made.text
    assert "1 earlier finding is resolved." in made.text
    assert "Resolved by this run" in made.text
    assert "waits for a person parked" in made.text


def test_a_run_over_parquet_has_no_number_and_details_as_text() -> None:
    row = finding("parked", first_run=None, detail='{"asked": 15, "unanswered": null, "why": {"url": true}}')
    made = page(run(run_id=None, state="findings", open=1, new=1), [day(found={"parked": 1})], [row])
    assert "not recorded" in made.text
    assert "asked 15 why url yes" in made.text
    assert " new day" not in made.text


def test_without_the_service_s_address_nothing_links_out() -> None:
    made = page(run(state="findings", open=1), [day(found={"parked": 1})], [finding("parked")], base_url=None)
    assert set(made.links) == {"#parked"}
    assert "docs/findings/parked.md" in made.text


@pytest.mark.parametrize("url", ["javascript:alert(1)", "halfnote.example", ""])
def test_an_address_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="http"):
        page(run(), base_url=url)


def test_what_comes_from_outside_is_escaped_everywhere() -> None:
    row = finding(
        EVIL,
        subject=EVIL,
        subscription_id=3,
        subscription=EVIL,
        transaction_id='"><script>',
        producer_group=EVIL,
        detail={EVIL: EVIL, "list": [EVIL], "object": {EVIL: EVIL}},
    )
    names = [EVIL, 'font-family: x; id="y" url(#z) #010203', "$x_1$ & <b>", "</svg></text>", "<metadata>"]
    drawn = busy(subscriptions=[subscription(name) for name in names], others=subscription(None, subscriptions=3))
    given = run(state="findings", open=1, engine=EVIL, source=EVIL, seconds={EVIL: 1.0}, error=EVIL)
    gone = finding(EVIL, subject=EVIL, resolved_at=ENDED, resolved_run=412)
    made = page(given, [day(found={EVIL: 1}, figures=drawn)], [row, gone])
    assert "script" not in made.tags
    assert EVIL not in made.html
    assert f"{URL}/transactions/%22%3E%3Cscript%3E" in made.links
    assert made.tags.count("svg") == made.html.count("</svg>") == 5
    assert "$x_1$ & <b>" in made.text
    assert page(run(state="failed", error=EVIL)).text.count(EVIL) == 1


def test_nothing_is_fetched_and_links_go_to_the_service_alone() -> None:
    made = page(
        run(state="findings", open=1),
        [day(found={"parked": 1}, figures=busy(subscriptions=[subscription("points")]))],
        [finding("parked")],
        [{"day": DAY - timedelta(days=n), "state": "final", "counts": {"half": n}, "found": {}} for n in range(30)],
    )
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(made.tags)
    assert all(link.startswith((f"{URL}/", "#")) for link in made.links)
    assert {link for link in made.links if link.startswith("#")} <= {f"#{name}" for name in made.ids}
    assert not re.search(r"https?://(?!halfnote\.example)|@import|url\((?!#)", made.html)
    assert "default-src 'none'" in made.html


def test_plots_share_a_page_without_sharing_names() -> None:
    days = [day(DAY - timedelta(days=n), figures=busy(subscriptions=[subscription("points")])) for n in range(3)]
    made = page(run(), days)
    assert made.tags.count("svg") == 15
    assert len(made.ids) == len(set(made.ids))
    # Colors are the page's, so that dark and print have their own.
    assert not re.search(r"#0102|#[0-9a-f]{6}", "".join(re.findall(r"<svg.*?</svg>", made.html, re.DOTALL)))


def test_only_the_newest_days_are_drawn() -> None:
    days = [day(DAY - timedelta(days=n), figures=busy()) for n in range(DRAWN_DAYS + 2)][::-1]
    made = page(run(), days)
    assert made.tags.count("details") == DRAWN_DAYS
    assert f"The newest {DRAWN_DAYS} of {DRAWN_DAYS + 2} days are drawn." in made.text
    assert made.text.count("✓ 0") == DRAWN_DAYS + 2


def test_a_day_of_nothing_says_so_instead_of_drawing_it() -> None:
    made = page(run(), [day(counts={}, figures=figures())])
    assert "Nothing happened." in made.text
    assert "svg" not in made.tags
    assert "Nothing happened." in page(run(), [day(figures={})]).text


def test_plots_say_in_words_what_they_show() -> None:
    others = subscription(None, subscriptions=11)
    known = [subscription("points", dropped=4, waiting=5, dead=6), subscription(None)]
    made = page(run(), [day(figures=busy(subscriptions=known, others=others, latency_of_one_in=6))])
    for said in (
        "committed 1,000, at most 1,000 in 15 min",
        "undecided 3, at most 3 in 15 min",
        "by producer 50 % ≤ 100 ms, 99 % ≤ 100 ms",
        "checked 100 of 1,000 transactions",
        "points 50 % ≤ 50 ms, 99 % ≤ 5 s",
        "points 10 of 1,000 (1.00%)",
        "From one in 6 messages.",
        "points 1,000 10 4 5 6 50 ms 5 s",
        "subscription 7 1,000 10 0 0 0 50 ms 5 s",
        "11 others 1,000 10 0 0 0 50 ms 5 s",
    ):
        assert said in made.text


def test_dead_letters_are_said_beside_first_attempts() -> None:
    at_once = [1000] + [0] * (MOST_ATTEMPTS - 1)
    made = page(run(), [day(figures=busy(subscriptions=[subscription("points", attempts=at_once, dead=3, waiting=1)]))])
    assert "3 dead letters and 1 waiting. Every other delivery succeeded at the first attempt." in made.text
    made = page(run(), [day(figures=busy(subscriptions=[subscription("points", attempts=at_once)]))])
    assert "Every delivery succeeded at the first attempt." in made.text


def test_of_many_subscriptions_some_are_drawn_and_all_are_listed() -> None:
    every = [subscription(f"consumer-{number:02}") for number in range(50)]
    drawn = "".join(drawing.svg or "" for drawing in of_day(busy(subscriptions=every)))
    assert f"consumer-{DRAWN_SUBSCRIPTIONS - 1:02}" in drawn
    assert f"consumer-{DRAWN_SUBSCRIPTIONS:02}" not in drawn
    assert "consumer-49 1,000" in page(run(), [day(figures=busy(subscriptions=every))]).text


def test_the_trend_has_a_place_for_days_that_nobody_looked_at() -> None:
    rows = [
        {"day": DAY, "state": "provisional", "counts": {"half": 5}, "found": {"parked": 2, "unrouted": 1}},
        {"day": DAY - timedelta(days=3), "state": "final", "counts": {"half": 9, "receipt": 4}, "found": {"parked": 0}},
        {"day": DAY - timedelta(days=90), "state": "final", "counts": {"half": 9}, "found": {}},
    ]
    drawing = of_trend(rows)
    assert drawing.title == "The last 30 days"
    assert drawing.remark == "1 of 30 days proved, 1 with findings, 28 not covered. Outlines: provisional."
    assert drawing.svg is not None
    assert "at most 3 a day" in drawing.svg
    assert of_trend(rows[:1]).svg is None
    assert of_trend([]).svg is None


def test_the_score_of_a_day_and_its_trend_are_shown() -> None:
    whole = dict.fromkeys(("complete", "agreed", "timely", "orderly"), 100.0)
    scores = [whole, whole | {"timely": 97.5}, dict.fromkeys(whole), whole | {"complete": 99.98}]
    days = [day(DAY - timedelta(days=back), score=score) for back, score in enumerate(reversed(scores))]
    drawing = of_scores(days)
    assert drawing.title == "The score of the last 4 days"
    assert drawing.svg is not None
    for said in ("last 99.98, lowest 99.98", "last 100, lowest 97.5", "last 100, lowest 100"):
        assert said in drawing.svg
    shown = page(run(), days[:1], trend=days).text
    assert "complete agreed timely orderly" in shown
    assert "99.98 100 100 100" in shown
    assert "What the score lacks" in page(run(), days, trend=days).html
    # A day of an earlier version has no score.
    assert of_scores([day(), day(DAY - timedelta(days=1))]).svg is None
    assert "none none none none" in page(run(), [day()]).text


def test_a_page_about_several_names_the_installation_of_each_finding() -> None:
    def written(*kinds: str) -> Written:
        found = dict.fromkeys(kinds, 1)
        state = "findings" if kinds else "proved"
        given = run(state=state, open=len(kinds), new=len(kinds), resolved=0)
        return Written(given, [day(found=found)], [finding(kind, first_run=given["run_id"]) for kind in kinds], [])

    parts = [
        Part("eu", written("parked"), None, "http://eu/"),
        Part("us", written(), None),
        Part("x<y", None, "no & no"),
    ]
    made = Page(render_all(parts))
    assert "✕ 1 finding " in made.text
    assert "The run failed for x<y." in made.text
    for said in (
        "eu ✕ findings 1 1 0 0 1",
        "us ✓ proved 0 0 0 0 1",
        "x<y ! failed: no & no 0",
        "eu 2026-11-20 provisional",
    ):
        assert said in made.text, said
    assert {link for link in made.links if link.startswith("http")} >= {"http://eu/reconciliation/2026-11-20"}
    assert "us/report.html" in made.links
    assert not [link for link in made.links if link.startswith("x")]
    assert "nightly proof of 2026-11-20 ✕" in made.text
    proved = Page(render_all([Part("eu", written(), None), Part("us", written(), None)]))
    assert "✓ Proved" in proved.text
    failed = Page(render_all([Part("eu", written(), None), Part("us", None, "lost")]))
    assert "Proved" not in failed.text
    assert "The run failed for us The other installations are proved." in failed.text


def test_times_within_which_a_part_lies_are_upper_bounds() -> None:
    from_s = [1.0, 2.0, 5.0]
    assert within([0, 0, 0], from_s, 0.5) == ""
    assert [within([5, 4, 1], from_s, share) for share in (0.5, 0.9, 0.99)] == ["2 s", "5 s", "over 5 s"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.001, "1 ms"),
        (0.5, "500 ms"),
        (1, "1 s"),
        (100, "100 s"),
        (200, "3.3 min"),
        (5000, "83 min"),
        (10_000, "2.8 h"),
        (100_000, "28 h"),
        (200_000, "2.3 days"),
        (1_000_000, "12 days"),
    ],
)
def test_durations_are_said_as_people_say_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_a_long_detail_is_cut() -> None:
    [(name, said)] = details({"some_ids": ["x" * 400]})
    assert (name, len(said), said[-1]) == ("some ids", 301, "…")


def test_the_report_says_of_each_kind_what_the_service_says() -> None:
    assert {str(kind): tuple(meaning) for kind, meaning in SERVICE_MEANINGS.items()} == MEANINGS
    assert list(MEANINGS) == [str(kind) for kind in SERVICE_MEANINGS]
    assert set(MEANINGS) == {rule.kind for rule in RULES}
    assert docs_of("parked") == "/findings/kinds/parked"
