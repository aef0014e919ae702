"""The common parts of the shop and the bank: a pool, a producer, and the handling of a request in one of the ways."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from asyncpg import IntegrityConstraintViolationError
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from halfnote import BarrierRefused, CheckEndpoint, HalfFailed, Outgoing, PlainFailed, TransactionProducer
from halfnote.barrier import AsyncBarrier
from halfnote.databases.asyncpg import Asyncpg

from examples.order_1030.deaths import HEADER, Deadly, dies_at
from examples.order_1030.pool import Pool, PoolEmpty
from examples.order_1030.ways import WAYS, Means, Write

CHECK_PATH = "/halfnote/check"
# The same long timeout in all ways, because the broker's answer time is one of the measurements.
ATTEMPT_S, WITHIN_S = 30.0, 60.0


@dataclass(frozen=True)
class Options:
    """The options of a service: the way's name, its own database, and its connection to Halfnote."""

    way: str
    database: str
    halfnote: str
    group: str
    secret: str


class Service:
    """A FastAPI app with its own database, which announces its writes."""

    def __init__(self, options: Options) -> None:
        self.pool = Pool(options.database)
        barrier = AsyncBarrier(Asyncpg(self.pool))
        producer = TransactionProducer(
            options.halfnote,
            group=options.group,
            barrier=barrier,
            attempt_s=ATTEMPT_S,
            half_within_s=WITHIN_S,
            # A shared request has no caller: its transport would not know which order the service must die at.
            batching=False,
            transport=Deadly(),
        )
        self._way, self._means = WAYS[options.way], Means(self.pool, producer, barrier)
        self.app = FastAPI(lifespan=self._lifespan)
        for error in (PoolEmpty, HalfFailed, PlainFailed, BarrierRefused):
            self.app.add_exception_handler(error, _not_now)
        self.app.add_exception_handler(IntegrityConstraintViolationError, _refused)
        self.app.add_api_route("/pool", self._pool_figures)
        endpoint = CheckEndpoint(barrier, group=options.group, secrets=options.secret)
        self.app.add_route(CHECK_PATH, endpoint.asgi())

    async def announce(self, request: Request, message: Outgoing, write: Write) -> None:
        """Write and announce it in this service's way, and die if the request says so."""
        dies_at(request.headers.get(HEADER))
        await self._way.announce(self._means, message, write)

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        await self.pool.open()
        if self._way.exact:
            await self._means.barrier.create_table()
        yield
        await self._means.producer.close()
        await self.pool.close()

    async def _pool_figures(self) -> dict[str, float]:
        return {"held_s": self.pool.held_s, "refused": self.pool.refused}


async def _not_now(request: Request, error: Exception) -> JSONResponse:
    """No connection was free, Halfnote did not answer, or a check came first and caused a rollback."""
    return JSONResponse({"detail": str(error)}, 503)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    """The database refused the write: not enough in stock, an unknown customer."""
    return JSONResponse({"detail": str(error)}, 409)
