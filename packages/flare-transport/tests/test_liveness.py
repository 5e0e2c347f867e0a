"""When a heartbeat is due, and when silence is death."""

from hypothesis import given
from hypothesis import strategies as st

from flare_transport import HeartbeatSettings, Liveness

SETTINGS = HeartbeatSettings(interval_seconds=1.0, deadline_seconds=5.0)


def test_a_heartbeat_is_due_at_once_and_then_every_interval():
    liveness = Liveness(SETTINGS, 100.0)
    assert liveness.is_due(100.0)
    liveness.sent(100.0)
    assert not liveness.is_due(100.9)
    assert liveness.is_due(101.0)
    assert liveness.next_timer() == 101.0


def test_silence_for_the_deadline_is_death():
    liveness = Liveness(SETTINGS, 100.0)
    assert not liveness.is_dead(104.9)
    assert liveness.is_dead(105.0)


@given(st.lists(st.floats(0.0, 4.9), max_size=20))
def test_whoever_is_heard_in_time_lives(gaps):
    now = 100.0
    liveness = Liveness(SETTINGS, now)
    for gap in gaps:
        now += gap
        assert not liveness.is_dead(now)
        liveness.heard(now)
    liveness.sent(now + 4.5)
    assert liveness.next_timer() == now + 5.0
    assert liveness.is_dead(now + 5.0)


def test_a_new_deadline_counts_from_when_it_is_set():
    liveness = Liveness(HeartbeatSettings(interval_seconds=1.0, deadline_seconds=60.0), 100.0)
    assert not liveness.is_dead(150.0)
    liveness.expect_within(5.0, 150.0)
    assert not liveness.is_dead(154.9)
    assert liveness.is_dead(155.0)
