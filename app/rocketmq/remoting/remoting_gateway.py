"""The part of the gateway that serves remoting clients: its server, the claims of checks, and renewals."""

import asyncio
import contextlib
import ssl
from collections.abc import Sequence

from app.rocketmq.checks import CheckClaims
from app.rocketmq.claiming import Claiming
from app.rocketmq.credentials import Credentials
from app.rocketmq.gateway_metrics import GatewayMetrics
from app.rocketmq.halfnote_api import HalfnoteApi
from app.rocketmq.remoting.membership import Membership
from app.rocketmq.remoting.pulling import Pulling
from app.rocketmq.remoting.remoting_clients import RemotingClients
from app.rocketmq.remoting.remoting_producing import RemotingProducing
from app.rocketmq.remoting.remoting_server import RemotingParts, RemotingServer
from app.rocketmq.remoting.routes import Routes
from app.rocketmq.remoting.sending_back import SendingBack
from app.rocketmq.renewals import Renewals
from app.rocketmq.request_limits import RequestLimits
from app.rocketmq.storing import Storing
from app.rocketmq.subscriptions import Subscriptions


class RemotingGateway:
    """Serves remoting clients. `addresses`: of all gateways, for their clients; none: that of each connection."""

    def __init__(
        self,
        api: HalfnoteApi,
        subscriptions: Subscriptions,
        credentials: Credentials,
        limits: RequestLimits,
        metrics: GatewayMetrics,
        addresses: Sequence[str] = (),
    ) -> None:
        self.metrics, self.buffers = metrics, api.buffers
        self.clients = RemotingClients(several_brokers=len(set(addresses)) > 1)
        self.checks = CheckClaims(api, self.clients, metrics, "remoting")
        self.clients.on_change = self.checks.adjust
        self.renewals = Renewals(api, self.clients)
        self._claiming = claiming = Claiming(api, subscriptions)
        sending_back = SendingBack(self.clients, claiming, self.renewals)
        self._membership = membership = Membership(self.clients, subscriptions, claiming, self.renewals, limits.topics)
        parts = RemotingParts(
            Routes(addresses),
            membership,
            Pulling(claiming, subscriptions, self.renewals),
            sending_back,
            RemotingProducing(Storing(api, self.checks), sending_back, limits.body_bytes),
        )
        self._server = server = RemotingServer(credentials, metrics, self.clients, parts, limits, api.buffers)
        metrics.watch(
            "remoting",
            clients=lambda: len(server),
            checks=lambda: len(self.checks),
            held=lambda: len(self.renewals),
        )
        self._renewing: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen; return the port. Raises OSError."""
        listening = await self._server.start(host, port, tls)
        self._renewing = asyncio.create_task(self.renewals.run())
        return listening

    async def stop(self) -> None:
        """End all connections.

        What clients hold comes again when its time is over; what they did not get, or left with their group, at once.
        """
        await self.checks.stop()
        await self._server.stop()
        await self._membership.stop()
        await self._claiming.stop()
        if self._renewing is not None:
            self._renewing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._renewing
