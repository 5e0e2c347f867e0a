"""Every fuzz target over its corpus and a short budget; the harness itself finds what it should."""

from __future__ import annotations

import contextlib
import hmac
import json
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from flare_qualify.fuzz.__main__ import main
from flare_qualify.fuzz.choices import Choices
from flare_qualify.fuzz.corpus import Corpus
from flare_qualify.fuzz.loop import fuzz
from flare_qualify.fuzz.mutate import Mutator
from flare_qualify.fuzz.registry import TARGETS, chosen
from flare_qualify.fuzz.target import Target, Violation, require
from flare_qualify.fuzz.targets import http
from flare_qualify.fuzz.targets.samples import JOIN_SAMPLES, WIRES
from flare_qualify.fuzz.tree import ODD_VALUES, changed, places
from flare_transport import LinkOffer

SECONDS = 0.3


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_target_finds_nothing_in_its_corpus_and_a_short_run(target, tmp_path):
    result = fuzz(target, seconds=SECONDS, seed=20261130, corpus=Corpus(crashes=tmp_path))
    assert not result.crashes, result.crashes[0].trace
    assert result.executions >= result.corpus > 3


def test_every_odd_value_in_every_field_of_a_request_is_taken_or_refused():
    (target,) = chosen(["http"])
    with target.open() as execute:
        for number, (_, sample) in enumerate(http.SAMPLES):
            for place in range(len(list(places(sample)))):
                for odd in range(len(http.ODD_JSON)):
                    # POST, a changed sample, this one, one change: this place is replaced by this value.
                    execute(bytes((0, 3, number, 1, place, 0, odd)))


def test_every_odd_value_in_every_field_of_a_message_is_taken_or_refused():
    (target,) = chosen(["messages"])
    with target.open() as execute:
        for number, wire in enumerate(WIRES):
            for which, sample in enumerate(wire.samples):
                for change in _single_changes(sample):
                    execute(bytes((number, which)) + change)


# What a leader hears of a peer that keeps to the protocol, and a peer of a leader: message, as it is; Hello of rank 1.
HONEST = {1: ((0, 1, 1), (1, 1), (6, 1), (8, 1)), 0: ((4, 1), (5, 1), (7, 1), (9, 1))}


@pytest.mark.parametrize("is_leader", [1, 0])
def test_every_odd_value_in_every_join_message_at_every_turn_goes_on_or_fails_by_name(is_leader):
    (target,) = chosen(["join"])
    with target.open() as execute:
        for turn in range(len(HONEST[is_leader])):
            before = b"".join(bytes(message) for message in HONEST[is_leader][:turn])
            for which, sample in enumerate(JOIN_SAMPLES):
                as_is = (which, 0, 0) if which == 0 else (which, 0)
                for change in _single_changes(sample):
                    execute(bytes((0, is_leader)) + before + bytes(as_is) + change)


def _single_changes(sample) -> Iterator[bytes]:
    """The choices of `odd_message` that put each odd value in each place."""
    tree = msgspec.msgpack.decode(msgspec.msgpack.encode(sample))
    for place in range(len(list(places(tree)))):
        for odd in range(len(ODD_VALUES)):
            yield bytes((0, 0, place, 0, odd))


def _nothing(*args, **kwargs) -> None:
    return None


ALWAYS_EQUAL = SimpleNamespace(compare_digest=lambda left, right: True, digest=hmac.digest)

PLANTED = {
    "frames": ("flare_transport.framing.FrameDecoder._collect_header", lambda self, taken: bytes(taken).ljust(16)),
    "handshake": ("flare_transport.handshake.hmac", ALWAYS_EQUAL),
    "greeting": ("flare_transport.record_listener.hmac", ALWAYS_EQUAL),
    "record": ("flare_qualify.fuzz.targets.records.check_header", _nothing),
    "messages": ("flare_cache.record_link._ack_decoder", msgspec.msgpack.Decoder()),
    "links": ("flare_cli.control_group._decode_offer", msgspec.msgpack.Decoder(LinkOffer).decode),
    "jobs": ("flare_qualify.fuzz.targets.protocols.job_problem", _nothing),
    "key-values": (
        "flare_transport.key_value_table.KeyValueTable._delete",
        lambda self, key: bool(self._values.pop(key)),
    ),
    "http": ("flare_cli.server.completions.check_token_ids", _nothing),
    "directory": ("flare_cache.directory._is_temporary", lambda name: not name.endswith(".rec")),
    "set-file": ("flare_qualify.fuzz.targets.files.check_set_file", _nothing),
    "key-files": ("flare_transport.keys._check_private", _nothing),
    "join-index": (
        "flare_cache.join_index.has_possible_counts",
        lambda rows, max_tokens: np.ones(len(rows), dtype=bool),
    ),
    "settings": ("flare_qualify.fuzz.targets.files.check_config", lambda config: config),
}
"""One check taken out for each target."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_target_sees_that_a_check_is_missing(name, tmp_path, monkeypatch):
    place, stand_in = PLANTED[name]
    monkeypatch.setattr(place, stand_in)
    (target,) = chosen([name])
    result = fuzz(target, seconds=60.0, seed=1, corpus=Corpus(crashes=tmp_path), max_crashes=1)
    assert result.crashes, f"{result.executions} executions and nothing found"


def broken_target(**changes) -> Target:
    def execute(data: bytes) -> None:
        require(b"\x07" not in data, "a seven")

    values = {
        "name": "broken",
        "proves": "No sevens.",
        "open": lambda: contextlib.nullcontext(execute),
        "seeds": lambda: [b"\x01\x02\x03"],
        "words": (b"\x07",),
        "max_bytes": 64,
    }
    return Target(**(values | changes))


def test_a_broken_rule_is_found_once_and_its_input_kept_and_replayed(tmp_path):
    corpus = Corpus(tmp_path)
    result = fuzz(broken_target(), seconds=0.3, seed=1, corpus=corpus)
    (crash,) = result.crashes
    assert "Violation: a seven" in crash.error
    (kept,) = (tmp_path / "broken").iterdir()
    assert b"\x07" in kept.read_bytes()
    assert str(kept) == crash.file
    again = fuzz(broken_target(words=()), seconds=0.0, seed=1, corpus=corpus)
    assert (again.corpus, again.executions, len(again.crashes)) == (2, 2, 1)


def test_the_same_seed_makes_the_same_inputs_within_the_limit():
    def inputs(seed: int) -> list[bytes]:
        mutator = Mutator(seed, [b"word"], 50)
        return [mutator.mutated([b"one input", b"another"]) for _ in range(300)]

    assert inputs(3) == inputs(3) != inputs(4)
    assert all(len(data) <= 50 for data in inputs(3))


def test_choices_never_run_out():
    choices = Choices(b"\x05")
    assert [choices.integer(0, 9), choices.integer(3, 9), choices.piece(8), choices.flag()] == [5, 3, b"", False]
    assert choices.is_spent


def test_a_change_in_a_tree_leaves_the_original_as_it_was():
    tree = {"a": [1, {"b": b"x"}], "c": None}
    for number in range(256):
        changed(tree, Choices(bytes((number % 7, number % 8, number, number // 3))))
    assert tree == {"a": [1, {"b": b"x"}], "c": None}
    assert len(list(places(tree))) == 6


def test_the_command_prints_and_writes_what_it_ran(tmp_path, capsys):
    summary = tmp_path / "fuzz.json"
    arguments = [
        "frames",
        "--seconds",
        "0.2",
        "--engine",
        "mutation",
        "--corpus",
        str(tmp_path),
        "--json",
        str(summary),
    ]
    assert main(arguments) == 0
    (run,) = json.loads(summary.read_text())["targets"]
    assert run["target"] == "frames"
    assert run["executions_per_second"] > 10
    assert "frames" in capsys.readouterr().out


def test_an_unknown_target_is_named(capsys):
    assert main(["no-such"]) == 2
    assert "no fuzz target 'no-such'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="handshake"):
        chosen(["x"])


def test_one_input_can_be_run_again(tmp_path):
    (tmp_path / "input").write_bytes(b"\x00\x01abc")
    assert main(["frames", "--input", str(tmp_path / "input")]) == 0


def test_a_rule_holds_without_assertions():
    with pytest.raises(Violation):
        require(False, "broken")
