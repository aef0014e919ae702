"""Background work: each loop is a step, and `runner.py` alone repeats steps."""

from app.loops import accept, checkback, clock, findings, gauges, held_back, news, ping, ready, routing, sweep, upkeep
from app.loops.checkback import CheckBack
from app.loops.news import News
from app.loops.ping import Pings
from app.loops.relay import CALM_S, EVERY_S, Relay
from app.loops.routing import Routing
from app.loops.runner import Loop
from app.loops.sweep import Sweeps
from app.loops.wakeups import LISTEN_EVERY_S, TELL_EVERY_S, Woken, listen, tell
from app.runtime import Runtime


def all_loops(runtime: Runtime) -> list[Loop]:
    """Return the loops of a process: what each one follows, and the work, which `--role api` leaves to others."""
    following = [
        Loop("accept", accept.step, accept.EVERY_S),
        Loop("news", News().step, news.EVERY_S),
        Loop("clock", clock.step, clock.EVERY_S),
        Loop("ready", ready.step, ready.EVERY_S),
        Loop("tell", tell, TELL_EVERY_S, runtime.wake_ups.untold),
    ]
    if runtime.settings.role == "api":
        return following
    relay = Relay(runtime)
    checks, watch = CheckBack(), Routing()
    return [
        *following,
        Loop("listen", listen, LISTEN_EVERY_S),
        Loop("relay", Woken(relay).step, EVERY_S, runtime.wake_ups.relay, relay.drain, CALM_S),
        Loop("routing", watch.step, routing.EVERY_S, None, watch.drain),
        Loop("sweep", Sweeps(checks.wake.set).step, sweep.EVERY_S),
        Loop("checks", checks.step, checkback.EVERY_S, checks.wake, checks.drain),
        Loop("pings", Pings().step, ping.EVERY_S),
        Loop("held_back", held_back.step, held_back.EVERY_S),
        Loop("findings", findings.step, findings.EVERY_S),
        Loop("gauges", gauges.step, gauges.EVERY_S),
        Loop("upkeep", upkeep.step, upkeep.EVERY_S),
    ]
