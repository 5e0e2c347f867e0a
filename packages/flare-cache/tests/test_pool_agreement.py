"""All ranks use the pool in one session or none does, whatever is late, lost or said twice."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare_cache.pool.agreement import (
    AgreementTimes,
    Connect,
    Disconnect,
    PoolLeader,
    PoolState,
    PoolVoter,
    Say,
    StateChanged,
    SwitchedOff,
    SwitchedOn,
    Tell,
)
from flare_cache.pool.agreement_messages import (
    Lost,
    Propose,
    TurnOff,
    TurnOn,
    Vote,
    decode_pool_message,
    encode_pool_message,
)

SETTINGS = b"d" * 32
EPOCH = b"e" * 16


def new_leader(world_size: int = 2, num_addresses: int = 1, fraction: float = 0.5) -> PoolLeader:
    numbers = itertools.count(1)
    return PoolLeader(
        world_size=world_size,
        num_addresses=num_addresses,
        settings=SETTINGS,
        draw_session=lambda: next(numbers).to_bytes(16, "big"),
        draw_fraction=lambda: fraction,
    )


def proposals(effects) -> list[tuple[int, Propose]]:
    return [(e.rank, e.message) for e in effects if isinstance(e, Tell) and isinstance(e.message, Propose)]


def told(effects, kind) -> list[int]:
    return sorted(e.rank for e in effects if isinstance(e, Tell) and isinstance(e.message, kind))


def agree(leader: PoolLeader, world_size: int = 2, now: float = 0.0) -> bytes:
    ((_, proposal),) = proposals(leader.tick(now))
    for rank in range(world_size):
        leader.heard(rank, Vote(proposal.session, rank, EPOCH, ""), now)
    return proposal.session


def test_rank_zero_connects_first_and_its_managers_epoch_is_proposed_to_the_others() -> None:
    leader = new_leader(3)
    ((rank, first),) = proposals(leader.tick(0.0))
    assert (rank, first.epoch) == (0, b"")
    asked = proposals(leader.heard(0, Vote(first.session, 0, EPOCH, ""), 1.0))
    assert asked == [(1, Propose(first.session, 0, EPOCH, SETTINGS)), (2, Propose(first.session, 0, EPOCH, SETTINGS))]
    assert leader.heard(2, Vote(first.session, 2, EPOCH, ""), 2.0) == []
    effects = leader.heard(1, Vote(first.session, 1, EPOCH, ""), 2.0)
    assert told(effects, TurnOn) == [0, 1, 2]
    assert (leader.state, leader.session) == (PoolState.ON, first.session)


def test_one_no_turns_every_rank_off_and_names_the_rank() -> None:
    leader = new_leader(3)
    ((_, first),) = proposals(leader.tick(0.0))
    leader.heard(0, Vote(first.session, 0, EPOCH, ""), 0.0)
    effects = leader.heard(2, Vote(first.session, 2, b"", "cannot register 8 MiB"), 0.0)
    assert told(effects, TurnOff) == [0, 1, 2]
    assert StateChanged(PoolState.OFF, None, {2: "cannot register 8 MiB"}) in effects
    assert leader.session is None
    # A vote that was on its way counts for nothing any more.
    assert leader.heard(1, Vote(first.session, 1, EPOCH, ""), 0.0) == []


def test_a_rank_that_does_not_vote_in_time_turns_all_off() -> None:
    leader = new_leader(3)
    ((_, first),) = proposals(leader.tick(0.0))
    leader.heard(0, Vote(first.session, 0, EPOCH, ""), 4.0)
    leader.heard(1, Vote(first.session, 1, EPOCH, ""), 5.0)
    assert leader.tick(13.9) == []
    (changed,) = [e for e in leader.tick(14.0) if isinstance(e, StateChanged)]
    assert changed.reasons == {2: "has not voted within 10 s"}


def test_a_rank_that_met_another_manager_turns_all_off() -> None:
    leader = new_leader()
    ((_, first),) = proposals(leader.tick(0.0))
    leader.heard(0, Vote(first.session, 0, EPOCH, ""), 0.0)
    assert told(leader.heard(1, Vote(first.session, 1, b"f" * 16, ""), 0.0), TurnOff) == [0, 1]


def test_a_rank_that_loses_its_manager_turns_all_off_and_a_new_session_is_agreed_on() -> None:
    leader = new_leader()
    session = agree(leader)
    effects = leader.heard(1, Lost(session, 1, "reset by peer"), 100.0)
    assert told(effects, TurnOff) == [0, 1]
    retry_at = leader.next_timer()
    assert retry_at is not None
    assert 100.1 <= retry_at <= 101.0
    assert agree(leader, now=retry_at) != session


def test_pauses_are_short_in_the_first_minute_and_at_most_five_seconds_later() -> None:
    leader = new_leader(1, fraction=0.999)
    now, pauses = 0.0, []
    while now < 80:
        ((_, proposal),) = proposals(leader.tick(now))
        leader.heard(0, Vote(proposal.session, 0, b"", "unreachable"), now)
        at = leader.next_timer()
        assert at is not None
        pauses.append((now, at - now))
        now = at
    assert all(0.1 <= pause <= 1.0 for at, pause in pauses if at < 60)
    assert all(1.0 < pause <= 5.0 for at, pause in pauses if at > 61)


def test_a_failed_attempt_moves_on_to_the_next_address_and_a_lost_session_tries_its_own_first() -> None:
    leader = new_leader(1, num_addresses=2)
    addresses = []
    for now in (0.0, 10.0, 20.0):
        ((_, proposal),) = proposals(leader.tick(now))
        addresses.append(proposal.address)
        leader.heard(0, Vote(proposal.session, 0, b"", "unreachable"), now)
    assert addresses == [0, 1, 0]
    session = agree(leader, 1, 30.0)
    leader.heard(0, Lost(session, 0, "gone"), 40.0)
    assert proposals(leader.tick(50.0))[0][1].address == 1


def test_a_stopped_leader_tells_all_and_never_proposes_again() -> None:
    leader = new_leader()
    agree(leader)
    assert told(leader.stop("the group ends", 5.0), TurnOff) == [0, 1]
    assert (leader.tick(1e9), leader.next_timer()) == ([], None)


def test_a_voter_connects_votes_and_is_on_only_when_rank_zero_says_so() -> None:
    voter = PoolVoter(1, settings=SETTINGS)
    session = b"s" * 16
    assert voter.heard(Propose(session, 2, EPOCH, SETTINGS)) == [Connect(session, 2)]
    assert voter.connected(session, EPOCH) == [Say(Vote(session, 1, EPOCH, ""))]
    assert voter.session is None
    assert voter.heard(TurnOn(b"t" * 16)) == []
    assert voter.heard(TurnOn(session)) == [SwitchedOn(session)]
    assert voter.session == session
    assert voter.heard(TurnOff(session, "why")) == [SwitchedOff(session, "why"), Disconnect(session)]
    assert voter.session is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda voter, session: voter.failed(session, "refused"), "refused"),
        (lambda voter, session: voter.connected(session, b"f" * 16), "started anew"),
    ],
)
def test_a_voter_that_cannot_join_says_why(change, word) -> None:
    voter = PoolVoter(1, settings=SETTINGS)
    voter.heard(Propose(b"s" * 16, 0, EPOCH, SETTINGS))
    vote = next(e.message for e in change(voter, b"s" * 16) if isinstance(e, Say))
    assert isinstance(vote, Vote)
    assert word in vote.reason
    assert voter.heard(TurnOn(b"s" * 16)) == []


def test_a_voter_with_other_settings_refuses_without_connecting() -> None:
    voter = PoolVoter(1, settings=SETTINGS)
    effects = voter.heard(Propose(b"s" * 16, 0, EPOCH, b"x" * 32))
    assert not any(isinstance(e, Connect) for e in effects)
    assert any(isinstance(e, Say) for e in effects)


def test_a_fault_of_either_half_ends_the_session_for_all() -> None:
    leader = new_leader()
    agree(leader)
    assert told(leader.fault("a frame was not sent", 1.0), TurnOff) == [0, 1]
    assert leader.fault("again", 2.0) == []
    voter = PoolVoter(1, settings=SETTINGS)
    assert voter.fault("nothing to lose") == []
    voter.heard(Propose(b"s" * 16, 0, EPOCH, SETTINGS))
    voter.connected(b"s" * 16, EPOCH)
    voter.heard(TurnOn(b"s" * 16))
    assert voter.fault("broken")[-1] == Say(Lost(b"s" * 16, 1, "broken"))
    assert voter.session is None


def test_a_connection_that_comes_after_its_session_is_given_up() -> None:
    voter = PoolVoter(0, settings=SETTINGS)
    voter.heard(Propose(b"s" * 16, 0, b"", SETTINGS))
    voter.heard(TurnOff(b"s" * 16, "late"))
    assert voter.connected(b"s" * 16, EPOCH) == [Disconnect(b"s" * 16)]


@given(
    st.one_of(
        st.builds(Propose, st.binary(max_size=16), st.integers(0, 9), st.binary(max_size=16), st.binary(max_size=32)),
        st.builds(Vote, st.binary(max_size=16), st.integers(0, 9), st.binary(max_size=16), st.text(max_size=600)),
        st.builds(TurnOn, st.binary(max_size=16)),
        st.builds(TurnOff, st.binary(max_size=16), st.text(max_size=600)),
        st.builds(Lost, st.binary(max_size=16), st.integers(0, 9), st.text(max_size=600)),
    )
)
def test_a_message_travels_within_its_frames_limit(message) -> None:
    payload = encode_pool_message(message)
    assert len(payload) <= 2048
    found = decode_pool_message(payload)
    assert type(found) is type(message)
    assert found.session == message.session


class World:
    """Leader and voters with a queue in each direction of each link, and connections that end in any order."""

    def __init__(self, world_size: int, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.times = AgreementTimes()
        self.leader = new_leader(world_size)
        self.voters = [PoolVoter(rank, settings=SETTINGS) for rank in range(world_size)]
        self.down: list[list] = [[] for _ in range(world_size)]
        self.up: list[list] = [[] for _ in range(world_size)]
        self.connecting: list[tuple[int, bytes]] = []
        self.open: list[tuple[int, bytes]] = []
        self.epoch = 1

    def lead(self, effects) -> None:
        for effect in effects:
            if isinstance(effect, Tell):
                self.down[effect.rank].append(effect.message)

    def vote(self, rank: int, effects) -> None:
        for effect in effects:
            match effect:
                case Connect(session, _):
                    self.connecting.append((rank, session))
                case Say(message):
                    self.up[rank].append(message)
                case Disconnect(session) if (rank, session) in self.open:
                    self.open.remove((rank, session))

    def step(self) -> None:
        match self.rng.randrange(7):
            case 0 | 1:
                rank = self.rng.randrange(len(self.voters))
                if self.down[rank]:
                    self.vote(rank, self.voters[rank].heard(self.down[rank].pop(0)))
            case 2 | 3:
                rank = self.rng.randrange(len(self.voters))
                if self.up[rank]:
                    self.lead(self.leader.heard(rank, self.up[rank].pop(0), self.now))
            case 4 if self.connecting:
                rank, session = self.connecting.pop(self.rng.randrange(len(self.connecting)))
                if self.rng.random() < 0.15:
                    self.vote(rank, self.voters[rank].failed(session, "refused"))
                else:
                    self.open.append((rank, session))
                    self.vote(rank, self.voters[rank].connected(session, self.epoch.to_bytes(16, "big")))
            case 5 if self.open and self.rng.random() < 0.05:
                self.epoch += 1
                for rank, session in list(self.open):
                    self.open.remove((rank, session))
                    self.vote(rank, self.voters[rank].lost(session, "the manager is gone"))
            case _:
                self.now += self.rng.random() * 0.5
                self.lead(self.leader.tick(self.now))

    def check(self) -> None:
        on = {voter.session for voter in self.voters if voter.session is not None}
        assert len(on) <= 1, "two sessions at a time"
        session = self.leader.session
        if session is not None:
            # Every rank is on, or will be before the next job, or has said that it is not any more.
            for rank, voter in enumerate(self.voters):
                coming = any(isinstance(m, TurnOn) and m.session == session for m in self.down[rank])
                leaving = any(isinstance(m, Lost) and m.session == session for m in self.up[rank])
                assert voter.session == session or coming or leaving


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32))
def test_never_mixed_and_always_on_again(world_size, seed) -> None:
    world = World(world_size, random.Random(seed))
    for _ in range(600):
        world.step()
        world.check()
    # Without further faults the ranks are on together soon.
    for _ in range(100_000):
        if world.leader.session is not None and all(v.session == world.leader.session for v in world.voters):
            return
        world.step()
        world.check()
    raise AssertionError("the ranks never came on together")
