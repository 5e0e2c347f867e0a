"""What a rank brings for the pool, and how its half of the agreement is put together from it."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flare_cache.pool.agent import LeaderPoolAgent, Open, PoolAgent, PoolSwitch
from flare_cache.pool.agreement import AgreementTimes, PoolLeader, PoolVoter
from flare_cache.pool.agreement_messages import PoolMessage

__all__ = ["PoolSetup", "new_agent", "new_leader_agent"]

_SESSION_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSetup:
    """One rank's.

    Attributes:
        open_connection: connects to one of the managers and registers; see :data:`flare_cache.pool.agent.Open`.
        num_addresses: of managers.
        settings: digest of what must be equal on every rank.
        shelf: the rank's shard transfers, which its transport has, too.
        pending_bytes: of records to be put, on the largest rank.
        is_always_worth: restore, even where computing is quicker.
        times: of the agreement.
    """

    open_connection: Open
    num_addresses: int
    settings: bytes
    shelf: PoolSwitch
    pending_bytes: int
    is_always_worth: bool = False
    times: AgreementTimes = field(default_factory=AgreementTimes)


def new_leader_agent(setup: PoolSetup, *, world_size: int, tell: Callable[[int, bytes], None]) -> LeaderPoolAgent:
    """Rank zero's agreement, not begun."""
    leader = PoolLeader(
        world_size=world_size,
        num_addresses=setup.num_addresses,
        settings=setup.settings,
        draw_session=lambda: secrets.token_bytes(_SESSION_BYTES),
        draw_fraction=random.random,
        times=setup.times,
    )
    return LeaderPoolAgent(leader, tell=tell)


def new_agent(
    setup: PoolSetup, rank: int, *, say: Callable[[PoolMessage], None], switches: Sequence[PoolSwitch] = ()
) -> PoolAgent:
    """A rank's half; ``switches`` are turned on behind its shelf."""
    voter = PoolVoter(rank, settings=setup.settings)
    return PoolAgent(voter, open_connection=setup.open_connection, switches=[setup.shelf, *switches], say=say)
