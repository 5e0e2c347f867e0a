"""The ranks' halves of the agreement on the pool, put together as in a server: threads are events of the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flare_cache.pool.agent import LeaderPoolAgent, PoolAgent, PoolConnection, PoolSwitch
from flare_cache.pool.agreement import PoolLeader, PoolVoter
from flare_cache.pool.agreement_messages import PoolMessage
from flare_cache.tier_store import PoolTierSettings, TierStore
from flare_qualify.sim.pool_shelf import SimPoolShelf
from flare_qualify.sim.process import RankProcess

__all__ = ["PoolLead", "new_pool_agent"]

_SETTINGS = bytes(32)
_TICK_SECONDS = 0.25


def new_pool_agent(
    process: RankProcess,
    shelf: SimPoolShelf,
    *,
    say: Callable[[PoolMessage], None],
    switches: Sequence[PoolSwitch] = (),
) -> PoolAgent:
    """A rank's half."""
    pool = shelf.pool

    def open_connection(address: int, session: bytes, on_lost: Callable[[str], None]) -> PoolConnection:
        del address
        return pool.connect(process.rank, session, after=process.after, on_lost=on_lost)

    return PoolAgent(
        PoolVoter(process.rank, settings=_SETTINGS),
        open_connection=open_connection,
        switches=[shelf, *switches],
        say=say,
        run_apart=lambda task: process.after(pool.trip(), f"{process.name} and the pool", task),
    )


class PoolLead:
    """Rank zero's: the agreement, and its clock."""

    def __init__(self, process: RankProcess, tell: Callable[[int, bytes], None]) -> None:
        context = process.context
        self._process = process
        self.machine = PoolLeader(
            world_size=context.options.world_size,
            num_addresses=1,
            settings=_SETTINGS,
            draw_session=lambda: context.rng.randbytes(16),
            draw_fraction=context.rng.random,
        )
        self.agent = LeaderPoolAgent(self.machine, tell=tell, clock=context.loop.clock)

    def start(self, store: TierStore, shelf: SimPoolShelf, *, pending_bytes: int, wake: Callable[[], None]) -> None:
        """Begin, once rank zero has joined."""
        agent = self.agent
        tier = store.open_pool(PoolTierSettings(self._process.context.options.world_size, pending_bytes, wake))
        agent._own = new_pool_agent(self._process, shelf, say=lambda message: agent.heard(0, message), switches=[tier])
        self._tick()

    def _tick(self) -> None:
        if not self.agent._closing.is_set():
            self.agent._turnstile.post(self.machine.tick)
            self._process.after(_TICK_SECONDS, "the pool's clock", self._tick)
