"""One direction of a connection as a machine: what passes, and when the fault says that it fired."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_qualify.faults.line_faults import (
    Bandwidth,
    BlackHole,
    Close,
    Cut,
    Delay,
    Duplicate,
    Flip,
    Hold,
    Line,
    Pause,
    Send,
    SlowClose,
    Stall,
    Swap,
)

PIECES = st.lists(st.binary(min_size=1, max_size=50), max_size=12)


def carry(line: Line, pieces: list[bytes]) -> tuple[bytes, list[object]]:
    """What would arrive, and every other effect."""
    effects = [effect for piece in pieces for effect in line.carry(piece)]
    effects += [Send(line.release()), *line.finish()]
    arrived = b"".join(effect.data for effect in effects if isinstance(effect, Send))
    return arrived, [effect for effect in effects if not isinstance(effect, Send)]


@given(PIECES, st.sampled_from([None, Delay(0.1), Bandwidth(100), SlowClose(1.0)]))
def test_what_changes_no_byte_changes_no_byte(pieces, fault) -> None:
    arrived, _ = carry(Line(fault), pieces)
    assert arrived == b"".join(pieces)


@given(PIECES, st.integers(0, 300), st.integers(1, 255))
def test_a_flip_changes_the_byte_at_its_position_and_no_other(pieces, at, mask) -> None:
    line = Line(Flip(at, mask))
    sent = b"".join(pieces)
    arrived, _ = carry(line, pieces)
    expected = bytearray(sent)
    if at < len(sent):
        expected[at] ^= mask
    assert arrived == bytes(expected)
    assert bool(line.fired) == (at < len(sent))


@given(PIECES, st.integers(0, 300))
def test_a_cut_lets_exactly_so_many_bytes_pass(pieces, at) -> None:
    line = Line(Cut(at))
    arrived = b""
    for piece in pieces:
        effects = line.carry(piece)
        arrived += b"".join(effect.data for effect in effects if isinstance(effect, Send))
        if Close.RESET in effects:
            break
    assert arrived == b"".join(pieces)[:at]
    assert bool(line.fired) == (at < len(b"".join(pieces)))


@given(PIECES, st.integers(0, 300))
def test_a_black_hole_swallows_everything_behind_its_position(pieces, at) -> None:
    arrived, others = carry(Line(BlackHole(at)), pieces)
    assert arrived == b"".join(pieces)[:at]
    assert others == []


@given(PIECES, st.integers(0, 300))
def test_a_stall_loses_nothing(pieces, at) -> None:
    line = Line(Stall(at))
    arrived, others = carry(line, pieces)
    assert arrived == b"".join(pieces)
    assert (Hold() in others) == bool(line.fired) == (at < len(b"".join(pieces)))


@given(PIECES, st.integers(0, 200), st.integers(1, 40))
def test_a_duplicate_sends_one_stretch_twice(pieces, at, size) -> None:
    sent = b"".join(pieces)
    arrived, _ = carry(Line(Duplicate(at, size)), pieces)
    added = len(arrived) - len(sent)
    assert 0 <= added <= size
    assert arrived == sent[: at + added] + sent[at:]


@given(PIECES, st.integers(0, 200), st.integers(1, 40))
def test_a_swap_exchanges_two_neighbouring_slices_or_nothing(pieces, at, size) -> None:
    line = Line(Swap(at, size))
    sent = b"".join(pieces)
    arrived, _ = carry(line, pieces)
    swapped = sent[:at] + sent[at + size : at + 2 * size] + sent[at : at + size] + sent[at + 2 * size :]
    assert arrived == (swapped if line.fired else sent)
    assert bool(line.fired) == (len(sent) >= at + 2 * size)


def test_positions_count_from_the_moment_of_arming() -> None:
    line = Line()
    line.carry(b"before")
    line.arm(Flip(1))
    assert line.carry(b"ab") == [Send(b"a"), Send(b"c")]


def test_a_healed_line_passes_everything() -> None:
    line = Line(BlackHole())
    assert line.carry(b"lost") == []
    line.arm(None)
    assert line.carry(b"kept") == [Send(b"kept")]
    assert line.fired == ["lost everything behind byte 0"]


def test_a_narrow_line_waits_for_the_time_that_its_bytes_take() -> None:
    waits = [effect.seconds for effect in Line(Bandwidth(200)).carry(bytes(100)) if isinstance(effect, Pause)]
    assert sum(waits) == pytest.approx(0.5)
