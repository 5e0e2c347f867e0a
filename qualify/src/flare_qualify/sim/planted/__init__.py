"""Planted bugs: patches applied to the real machines while a simulation runs, to prove that the checkers see.

Each names the rule that it breaks. A bug that no seed shows names a fault or a checker that is missing. The list is
that of the reliability study which the simulator was planned by, adapted to what flare has: links whose heartbeats are
the transport's, a copy's order against steps, and a pool that ranks agree on.
"""

from flare_qualify.sim.planted.job_bugs import JOB_BUGS
from flare_qualify.sim.planted.patching import PlantedBug
from flare_qualify.sim.planted.pool_bugs import POOL_BUGS
from flare_qualify.sim.planted.record_bugs import RECORD_BUGS

__all__ = ["PLANTED_BUGS", "PlantedBug"]

PLANTED_BUGS: tuple[PlantedBug, ...] = (*JOB_BUGS, *RECORD_BUGS, *POOL_BUGS)
