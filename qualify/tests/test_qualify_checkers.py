"""The checkers see what is wrong: another token, another bit, a record that one rank lacks, a process that stays."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from flare_cache.testing import GroupPlan, LocalGroup, token_geometries
from flare_qualify.checkers.answers import References, count_differences
from flare_qualify.checkers.records import ReportedRecords, check_parity
from flare_qualify.client import Answer, ServerError, complete
from flare_qualify.group import Group
from flare_qualify.history import History, read_history
from flare_qualify.models import ModelLibrary
from flare_qualify.process_facts import is_alive, kill_marked, processes_with, wait_gone
from flare_qualify.run_context import MARK, Context, ScenarioFailed
from flare_qualify.verdict import Damage, outcome_of
from flare_qualify.workloads.hostile import Hostile, hostile_requests, mutated_requests, send
from flare_qualify.workloads.kills import Kill
from flare_qualify.workloads.prompts import extend, prompt_of
from flare_qualify.workloads.requests import Attempt

TOPS = ((("a", -0.5), ("b", -1.0)), (("c", -0.25), ("d", -2.0)))
RIGHT = Answer("ac", 0.1, 0.2, 10, 2, logprobs=TOPS)


@pytest.fixture
def context(tmp_path) -> Context:
    history = History(tmp_path / "history.jsonl")
    return Context("one", "standard", tmp_path, 1, history, ModelLibrary(tmp_path / "models"))


def damage_of(context, what):
    return outcome_of(read_history(context.history.path), faults_due=False, restores_due=False).tally.damage[what]


def test_equal_answers_have_no_difference():
    assert count_differences("ac", TOPS, RIGHT) == 0
    assert count_differences("ac", (), RIGHT) == 0


def test_a_last_bit_is_a_difference():
    other = (TOPS[0], (("c", -0.25000000000000006), ("d", -2.0)))
    assert count_differences("ac", other, RIGHT) == 1


def test_missing_and_additional_tokens_are_differences():
    assert count_differences("a", TOPS[:1], RIGHT) == 1
    assert count_differences("acx", (*TOPS, TOPS[0]), RIGHT) == 1


def test_a_broken_stream_must_be_a_beginning():
    assert count_differences("a", TOPS[:1], RIGHT, is_whole=False) == 0
    assert count_differences("", (), RIGHT, is_whole=False) == 0
    assert count_differences("b", (), RIGHT, is_whole=False) == 1
    assert count_differences("a", TOPS[1:], RIGHT, is_whole=False) == 1


def test_wrong_tokens_are_damage_and_a_warm_reference_is_none(context):
    references = References(context)
    references.learn("prompt", RIGHT)
    references.compare("prompt", Answer("ax", 0.1, 0.2, 10, 2))
    broken = Attempt(None, 503, "lost", "q", (), 0.1)
    references.compare_attempt("prompt", broken, what=Damage.PAGES_REUSED)
    assert damage_of(context, Damage.WRONG_TOKENS) == 1
    assert damage_of(context, Damage.PAGES_REUSED) == 1
    with pytest.raises(ScenarioFailed):
        references.learn("other", Answer("", 0, 0, 5, 1, {"disk": 3}))


def make_directories(root: Path) -> Group:
    """The record directories of two ranks that hold the same two records, as a group that is not running."""
    root.mkdir()
    local = LocalGroup.start(GroupPlan(geometries=token_geometries(2, page_tokens=4, dims=[2, 2]), root=root))
    for number in range(2):
        local.store([10 * number + position for position in range(8)])
    local.settle()
    local.close()
    return Group(root, 2, root)


def test_a_kill_has_one_role_and_its_victims():
    assert Kill("worker", "store.link").victims == ()
    assert Kill("peer", "store.link", peer=2).victims == (2,)
    assert Kill("peer", "store.link", peer=2).spared == ("rank2",)
    assert Kill("api", "store.link", peer=2).rank == 2


def test_prompts_are_the_same_by_number_and_share_only_what_they_extend():
    assert prompt_of(3) == prompt_of(3) != prompt_of(4)
    assert extend(prompt_of(3), 1, 5)[:150] == prompt_of(3)
    assert len(extend(prompt_of(3), 1, 5)) == 155


def test_hostile_requests_are_many_and_distinct_by_name():
    requests = list(hostile_requests(vocab_size=259, max_len=1024))
    assert len({request.name for request in requests}) == len(requests) > 100
    chance = random.Random(5)
    assert [each.data for each in mutated_requests(chance, 5)] == [
        each.data for each in mutated_requests(random.Random(5), 5)
    ]


def served_once(answer: bytes) -> str:
    """The address of a server that takes one connection, reads a little and answers this."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with listener, connection:
            connection.recv(65536)
            connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_the_status_of_a_hostile_request_is_the_answers_and_0_without_any():
    assert send(served_once(b"HTTP/1.1 431 Too Large\r\n\r\n"), Hostile("x", b"GET / HTTP/1.1\r\n\r\n")) == 431
    assert send(served_once(b""), Hostile("x", b"GET / HTTP/1.1\r\n\r\n")) == 0


def test_a_stream_that_breaks_keeps_what_it_had_brought():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    event = b'data: {"choices": [{"text": "ab", "finish_reason": null}]}\n\n'
    with pytest.raises(ServerError) as caught:
        complete(served_once(head + event), "x", max_tokens=5)
    assert (caught.value.status, caught.value.text) == (200, "ab")
    failed = b'data: {"error": {"message": "the engine is lost"}}\n\n'
    with pytest.raises(ServerError, match="the engine is lost"):
        complete(served_once(head + event + failed), "x", max_tokens=5)


def test_processes_are_found_by_their_mark_and_killed(tmp_path):
    process = subprocess.Popen(["sleep", "60"], env=os.environ | {MARK: str(tmp_path)})
    while process.pid not in processes_with(MARK, str(tmp_path)):
        pass  # between fork and exec a process still has its parent's environment
    assert kill_marked(MARK, str(tmp_path)) == 1
    assert wait_gone({"sleep": process.pid}, timeout=10.0).keys() == {"sleep"}
    assert not is_alive(process.pid)
    process.wait()


def test_a_record_that_one_rank_lacks_is_partially_visible(context, tmp_path):
    group = make_directories(tmp_path / "group")
    assert check_parity(context, group, "whole") == 0
    reported = ReportedRecords(context)
    reported.names = {file.name for file in group.record_files(0)}
    assert len(reported.names) == 2
    assert reported.check(group, "whole") == 0
    (group.record_directory(1) / min(reported.names)).unlink()
    assert check_parity(context, group, "one gone") > 0
    assert reported.check(group, "one gone") == 1
    assert damage_of(context, Damage.LOST_REPORTED) == 1


def test_the_same_prompts_of_two_computations_are_not_the_same_records(context, tmp_path):
    one, other = make_directories(tmp_path / "one"), make_directories(tmp_path / "other")
    assert {file.name for file in one.record_files(0)} == {file.name for file in other.record_files(1)}
    shutil.rmtree(one.record_directory(1))
    other.record_directory(1).rename(one.record_directory(1))
    assert check_parity(context, one, "mixed") == 2
    assert damage_of(context, Damage.PARTIALLY_VISIBLE) == 2


def test_what_a_killed_store_leaves_is_told(context, tmp_path):
    group = make_directories(tmp_path / "group")
    (group.record_directory(1) / "left.tmp").touch()
    check_parity(context, group, "left")
    found = outcome_of(read_history(context.history.path), faults_due=False, restores_due=False)
    assert found.tally.failures == ["left: rank 1 has temporary files: ['left.tmp']"]
