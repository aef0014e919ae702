"""Sends `POST /half`, `/end` and `/messages` straight to their endpoints, past the framework.

Speed decides the form here. An endpoint takes the runtime, the caller, the body and the trace context. It returns what
its lane must commit, and how the outcome becomes a status and a JSON body. The rules and errors are the same as on
every other route: `RequestPipeline` holds them.
"""

from collections.abc import Mapping

from starlette.datastructures import State
from starlette.types import ASGIApp, Receive, Scope, Send

from app.admission.route_roles import RULES
from app.coordinator.lane_call import JsonAnswer, completed
from app.permissions import Caller
from app.runtime.state import Runtime
from app.server.request_pipeline import Begin, PipelineRoute, RequestPipeline, Respond


class FastPath:
    """An ASGI app in front of `app`; `state.runtime` is set while the service runs.

    `app.server.http_protocol` takes `pipeline` and `routes` (by path) and leaves ASGI out for them.
    """

    def __init__(self, app: ASGIApp, state: State, endpoints: Mapping[str, Begin]) -> None:
        self._app = app
        self.pipeline = RequestPipeline(state)
        self.routes = {
            path: PipelineRoute(_respond(begin), RULES["POST", path], template=path, method="POST", begin=begin)
            for path, begin in endpoints.items()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            route = self.routes.get(scope["path"])
            if route is not None:
                await self.pipeline.run(route, scope, receive, send)
                return
        await self._app(scope, receive, send)


def _respond(begin: Begin) -> Respond:
    async def respond(runtime: Runtime, caller: Caller, body: bytes, trace: str | None = None) -> JsonAnswer:
        return await completed(begin(runtime, caller, body, trace))

    return respond
