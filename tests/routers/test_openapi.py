"""The OpenAPI document: complete, consistent with itself, and true of the hot paths to the letter."""

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.clock import Clock
from app.config import Settings
from app.coordinator.decoding import decode
from app.coordinator.half_content import half_of
from app.errors import Problem, all_problems
from app.ids import uuid7
from app.main import ENDPOINTS, api
from app.routers import end, half, messages
from tests.support.examples import examples

DOCUMENT: dict[str, Any] = api.openapi()
OPERATIONS = [
    (path, method, operation) for path, methods in DOCUMENT["paths"].items() for method, operation in methods.items()
]


def validator(name: str) -> Any:
    """Return a validator of one of the document's schemas."""
    return jsonschema_rs.validator_for(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$ref": f"#/components/schemas/{name}",
            "components": DOCUMENT["components"],
        },
        validate_formats=True,
    )


def schema_names(content: dict[str, Any]) -> str:
    return str(content["schema"]["$ref"].rpartition("/")[2])


def test_every_path_is_there() -> None:
    assert set(ENDPOINTS) < set(DOCUMENT["paths"])
    for path in (
        "/transactions",
        "/transactions/{transaction_id}",
        "/transactions/{transaction_id}/check",
        "/transactions/{transaction_id}/verdict",
        "/transactions/{transaction_id}/reissue",
        "/transactions/check",
        "/transactions/verdict",
        "/transactions/reissue",
        "/messages/{message_id}",
        "/producer-groups",
        "/producer-groups/{name}",
        "/subscriptions",
        "/subscriptions/{name}",
        "/dead-letters",
        "/dead-letters/redeliver",
        "/dead-letters/{subscription}/{message_id}",
        "/topics",
        "/livez",
        "/readyz",
        "/metrics",
        "/version",
    ):
        assert path in DOCUMENT["paths"], path


def test_every_operation_is_described() -> None:
    names = [operation["operationId"] for _, _, operation in OPERATIONS]
    assert len(names) == len(set(names))
    for path, method, operation in OPERATIONS:
        assert operation["tags"], (path, method)
        assert operation["summary"], (path, method)
        for parameter in operation.get("parameters", ()):
            assert parameter["schema"], (path, parameter)
    assert DOCUMENT["servers"]
    assert "contact" not in DOCUMENT["info"]


def test_every_operation_names_its_refusals() -> None:
    slugs = {problem.slug for problem in all_problems()}
    for path, method, operation in OPERATIONS:
        wanted = {"400", "405", "408", "421", "431", "500", "503"} | (
            {"403", "413", "415"} if method != "get" else set()
        )
        assert wanted <= set(operation["responses"]), (path, method)
        for status, response in operation["responses"].items():
            if int(status) < 400:
                continue
            shown = response["content"]["application/problem+json"]
            assert schema_names(shown) == "ProblemDocument"
            assert set(shown["examples"]) <= slugs
            for example in shown["examples"].values():
                assert validator("ProblemDocument").is_valid(example["value"])
                assert example["value"]["status"] == int(status)


def test_limits_are_named_as_json_schema_names_them() -> None:
    def names(node: Any) -> set[str]:
        if isinstance(node, list):
            return set().union(*map(names, node))
        if not isinstance(node, dict):
            return set()
        return {name for name in node if isinstance(node[name], int)}.union(*map(names, node.values()))

    assert {"minimum", "maximum"} <= names(DOCUMENT)
    assert not {"ge", "gt", "le", "lt"} & names(DOCUMENT)


def test_every_reference_leads_somewhere() -> None:
    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return own + [found for value in node.values() for found in references(value)]
        return [found for value in node for found in references(value)] if isinstance(node, list) else []

    known = {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}
    used = set(references(DOCUMENT))
    assert used <= known
    assert known - used == set()


def test_examples_of_the_hot_paths_fit_their_schemas() -> None:
    for path in ENDPOINTS:
        operation = DOCUMENT["paths"][path]["post"]
        shown = [operation["requestBody"]["content"]["application/json"]]
        shown += [
            response["content"]["application/json"]
            for status, response in operation["responses"].items()
            if status < "300"
        ]
        assert len(shown) >= (3 if path in ("/half", "/end", "/messages") else 2)
        for content in shown:
            schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **content["schema"]}
            check = jsonschema_rs.validator_for(schema | {"components": DOCUMENT["components"]}, validate_formats=True)
            examples = [one["value"] for one in content.get("examples", {}).values()] or [content["example"]]
            assert len(examples) == len(content["schema"].get("oneOf", [None]))
            for example in examples:
                check.validate(example)
                assert "1030" in json.dumps(example)


def test_every_body_has_an_example_that_fits_its_schema() -> None:
    bodies = 0
    for path, method, operation in OPERATIONS:
        for name, body in {"request": operation.get("requestBody", {}), **operation["responses"]}.items():
            if (content := body.get("content", {}).get("application/json")) is None:
                continue
            bodies += 1
            schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **content["schema"]}
            check = jsonschema_rs.validator_for(schema | {"components": DOCUMENT["components"]}, validate_formats=True)
            shown = (
                [content["example"]] if "example" in content else [one["value"] for one in content["examples"].values()]
            )
            for example in shown:
                assert [error.message for error in check.iter_errors(example)] == [], (path, method, name)
    assert bodies > 60


def test_the_hot_paths_fields_are_described() -> None:
    for name in ("HalfRequest", "PlainRequest", "EndRequest", "JsonMessage", "BytesMessage", "CheckPolicy"):
        for field, described in DOCUMENT["components"]["schemas"][name]["properties"].items():
            plain = described.get("enum") or described.get("anyOf") or described.get("type") in ("array", "null")
            assert described.get("description") or plain, (name, field)


NEAR = uuid7(Clock().now())
MISSING = object()
NAMES = st.sampled_from(
    ["shop", "", "x" * 255, "x" * 256, "é" * 255, "\U0001f600" * 255, "a\n", "\x7f", "\x80", "a\x00b", " ", None, 1]
)
TOPICS = NAMES | st.sampled_from(["order", "halfnote.x", "halfnote.", "halfnote", "Halfnote.x", "a halfnote.x"])
HEADERS: st.SearchStrategy[Any] = st.sampled_from(
    [
        *({}, {"a": "b"}, {"": "x"}, {"a b": "x"}, {"-a": "x"}, {"a": "x\n"}, {"a": 1}, {"a" * 128: ""}),
        *(None, {"a\n": "x"}, {"é": "x"}, {"a": "é"}, {"A.b_c-9": "x"}, [], {"a" * 129: ""}),
    ]
)
TYPES = st.sampled_from(
    [
        *(
            "application/json",
            "application/json; charset=utf-8",
            "application/vnd.x+json",
            "application/json; charset=x",
        ),
        *(
            "text/plain",
            'a/b; x="y z"',
            "x",
            "text/plain\n",
            "application/json\n",
            'a/b; x="\x7f"',
            'a/b; x="é"',
            "a/é",
        ),
        *("a" * 254 + "/b", None, 1, "a/b;x=y;z=w", "a/b;", "application/json;\ncharset=utf-8", ""),
    ]
)
BASE64 = st.sampled_from(["", "QQ==", "QUI=", "QUJD", "QQ=", "QQ", "AAAA==", "Q Q=", "QQ==\n", "====", "é===", None, 5])
DELAYS = st.sampled_from([0, 1.5, -1, 3_456_000, 3_456_000.5, 3_456_001, "1", True, None])
JSON: st.SearchStrategy[Any] = st.sampled_from([None, 1, "x", {"a": [1.5, "\ud83d\ude00"]}, [], False])
WHOLE = st.sampled_from([1, 0, 1.0, 1.5, 1000, 1001, 86_400, 86_401, "1", True, None, -1])


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.just(MISSING) | values


def objects(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    made = st.fixed_dictionaries(fields)
    return made.map(lambda one: {name: value for name, value in one.items() if value is not MISSING})


# Mostly valid, so that a single fault is seen for itself.
def mostly(valid: Any, others: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(valid), st.just(valid), st.just(valid), others)


MESSAGE = objects(
    topic=mostly("order", maybe(TOPICS)),
    key=mostly("order-1030", maybe(NAMES)),
    tag=mostly(MISSING, NAMES),
    headers=mostly(MISSING, HEADERS),
    body=mostly({"order": 1030}, maybe(JSON)),
    body_base64=mostly(MISSING, BASE64),
    content_type=mostly(MISSING, TYPES),
    deliver_after_s=mostly(MISSING, DELAYS),
    unknown=mostly(MISSING, st.just(1)),
)
IDS = st.sampled_from([str(NEAR), str(NEAR).upper(), "9b2f4c1e-7a63-4d5b-8c1d-2f3e4a5b6c7d", "x", None, 1, ""])
POLICY = objects(
    immunity_s=maybe(WHOLE),
    interval_s=mostly(MISSING, WHOLE),
    max_checks=mostly(MISSING, WHOLE),
    on_exhausted=mostly(MISSING, st.sampled_from(["park", "rollback", "commit", None])),
    include_body=mostly(MISSING, st.sampled_from([True, 1, None])),
    unknown=mostly(MISSING, st.just(1)),
)
PLAIN = {
    "producer_group": mostly("shop", maybe(NAMES)),
    "messages": st.lists(MESSAGE, min_size=1, max_size=2)
    | st.sampled_from([0, 1, 100, 101]).map(lambda count: [{"topic": "order", "body": 1}] * count)
    | st.just(None),
    "transaction_id": mostly(MISSING, IDS),
    "unknown": mostly(MISSING, st.just(1)),
}
HALF = objects(**PLAIN, context=maybe(JSON), check=mostly(MISSING, POLICY | st.sampled_from([None, 1])))
END = objects(
    transaction_id=mostly(str(NEAR), maybe(IDS)),
    producer_group=mostly("shop", maybe(NAMES)),
    verdict=mostly("commit", maybe(st.sampled_from(["rollback", "unknown", "Commit", "", None]))),
    from_check=mostly(MISSING, st.sampled_from([True, False, None, 1, "true"])),
    reason=mostly(MISSING, st.sampled_from(["", "x" * 1000, "x" * 1001, "a\x00", "a\n", None, 1])),
    unknown=mostly(MISSING, st.just(1)),
)
SETTINGS = Settings(_env_file=None)


def refused(endpoint: str, body: bytes) -> Problem | None:
    """Return a hot path's refusal of a body, before the database is asked."""
    try:
        if endpoint == "EndRequest":
            decode(end._decoder, body)
        elif endpoint == "HalfRequest":
            half_of(decode(half._decoder, body), SETTINGS, Clock())
        else:
            half_of(decode(messages._decoder, body), SETTINGS, Clock())
    except Problem as problem:
        return problem
    return None


@pytest.mark.parametrize(
    ("name", "requests"), [("HalfRequest", HALF), ("PlainRequest", objects(**PLAIN)), ("EndRequest", END)]
)
def test_the_hot_paths_take_exactly_what_the_document_allows(
    name: str, requests: st.SearchStrategy[dict[str, Any]]
) -> None:
    documented = validator(name)
    seen = {True: 0, False: 0}

    @settings(
        max_examples=examples(600),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(requests)
    def agree(request: dict[str, Any]) -> None:
        allowed = documented.is_valid(request)
        fault = refused(name, json.dumps(request).encode())
        assert fault is None or (fault.status == 422 and fault.extra["field"]), fault
        assert (fault is None) == allowed, (fault, [error.message for error in documented.iter_errors(request)])
        seen[allowed] += 1

    agree()
    assert min(seen.values()) > examples(600) // 12
