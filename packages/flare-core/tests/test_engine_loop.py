"""The loop around the scheduler: threads, commands, drains, poisoning, peers; and the codec of what goes in and out."""

import queue
import threading

import msgspec
import pytest

from flare_core.engine.config import SchedulerConfig
from flare_core.engine.engine import Engine, NoGate, PeerLoop
from flare_core.engine.inbox import Inbox
from flare_core.engine.request import (
    AddRequest,
    CacheReset,
    CancelRequest,
    Drain,
    EngineRequest,
    Failed,
    Finished,
    FinishReason,
    Progress,
    ResetCache,
    Stop,
    Tokens,
    Usage,
    decode_commands,
    decode_events,
    encode_commands,
    encode_events,
)
from flare_core.engine.scheduler import Scheduler
from flare_core.errors import Poisoned
from flare_core.keys import token_array
from flare_core.metrics import METRICS
from flare_core.plan import encode_plan
from flare_core.prefix import Tier
from flare_core.sampling import SamplingParams
from flare_core.testing.collective import thread_collectives
from flare_core.testing.memory_store import MemoryPrefixStore
from flare_core.testing.oracle_config import OracleConfig
from flare_core.testing.oracle_memory import OracleMemory
from flare_core.testing.oracle_reference import oracle_group, oracle_text
from flare_core.testing.oracle_runner import OracleRunner
from flare_core.testing.oracle_world import OracleWorld

PAGE = 8
CONFIG = OracleConfig()
SETTINGS = SchedulerConfig(
    page_tokens=PAGE, num_pages=32, max_sequences=4, max_model_len=200, vocab_size=259, set_fingerprint=bytes(32)
)
PROMPT = list(range(40, 60))
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


def add(request_id, prompt=PROMPT, params=GREEDY):
    token_ids = token_array(prompt).tobytes()
    return AddRequest(EngineRequest(request_id=request_id, token_ids=token_ids, params=params))


class Serving:
    """An engine in a thread, and what it emits; it obeys ``at_first_token`` before it makes a second one."""

    def __init__(self, runner=None, *, store=None, gate=None, send_plan=lambda plan: None, at_first_token=()):
        runner = runner or oracle_group(CONFIG, world_size=1, page_tokens=PAGE, num_pages=SETTINGS.num_pages)
        self.events = queue.SimpleQueue()
        self.error = None
        self.engine = Engine(
            Scheduler(SETTINGS, store),
            runner,
            gate=gate or NoGate(),
            store=store,
            send_plan=send_plan,
            emit=self._emit,
        )
        self.at_first_token = at_first_token
        self.thread = threading.Thread(target=self._run, daemon=True)  # a failed test must end
        self.thread.start()

    def _run(self):
        try:
            self.engine.run()
        except Poisoned as error:
            self.error = error

    def _emit(self, events):
        for event in events:
            self.events.put(event)
            if isinstance(event, Tokens) and self.at_first_token:
                commands, self.at_first_token = self.at_first_token, ()
                self.send(*commands)

    def send(self, *commands):
        self.engine.inbox.put(commands)

    def next_event(self, *kinds):
        while True:
            event = self.events.get(timeout=20)
            if isinstance(event, kinds):
                return event

    def text_of(self, request_id):
        tokens = []
        while True:
            event = self.next_event(Tokens, Finished)
            assert event.request_id == request_id
            if isinstance(event, Finished):
                return tokens
            tokens.extend(event.token_ids)

    def join(self):
        self.thread.join(20)
        assert not self.thread.is_alive()


def test_an_idle_engine_wakes_for_a_request_and_serves_it():
    serving = Serving()
    serving.send(add("a"))
    assert serving.text_of("a") == oracle_text(CONFIG, PROMPT, GREEDY, page_tokens=PAGE)
    serving.send(Stop())
    serving.join()


def test_draining_finishes_what_runs_and_refuses_what_comes():
    serving = Serving()
    serving.send(add("a"), Drain(), add("late"))
    refused = serving.next_event(Failed)
    assert (refused.request_id, refused.status) == ("late", 503)
    assert len(serving.text_of("a")) == 6
    serving.join()


def test_stopping_fails_what_runs():
    serving = Serving(at_first_token=[Stop()])
    serving.send(add("a", params=SamplingParams(max_tokens=150, temperature=0.0)))
    failed = serving.next_event(Failed)
    assert (failed.request_id, failed.status) == ("a", 503)
    serving.join()


def test_a_cancelled_request_ends_once():
    serving = Serving(at_first_token=[CancelRequest("a"), CancelRequest("a"), CancelRequest("unknown")])
    serving.send(add("a", params=SamplingParams(max_tokens=150, temperature=0.0)))
    assert serving.next_event(Finished, Failed).reason is FinishReason.CANCELLED
    serving.send(Drain())
    serving.join()
    rest = []
    while not serving.events.empty():
        rest.append(serving.events.get())
    assert rest == []


def test_progress_is_told_before_the_first_token():
    serving = Serving()
    serving.send(add("a"), Drain())
    first = serving.events.get(timeout=20)
    assert first == Progress("a", first.phase, 19, 20)
    serving.join()


def test_each_tier_is_reset_or_the_refusal_says_why():
    group = oracle_group(CONFIG, world_size=1, page_tokens=PAGE, num_pages=SETTINGS.num_pages)
    store = MemoryPrefixStore([runner.memory for runner in group.runners], tier=Tier.MEMORY)
    serving = Serving(group, store=store, gate=store)
    for tier, failure in [(Tier.DEVICE, None), (Tier.MEMORY, None), (Tier.DISK, "the disk tier cannot be reset")]:
        serving.send(ResetCache("r", tier))
        assert serving.next_event(CacheReset) == CacheReset("r", tier, failure)
    serving.send(add("a"), Drain())
    assert len(serving.text_of("a")) == 6
    serving.join()
    assert store.num_stores > 0, "a drain waits for stores"


@pytest.mark.parametrize(("with_fetch", "num_pages"), [(False, 2), (True, 3)])
def test_after_a_poisoning_requests_fail_with_503_and_no_page_of_a_transfer_is_used_again(with_fetch, num_pages):
    world = OracleWorld(CONFIG, SETTINGS, with_store=True)
    world.generate(PROMPT, GREEDY)
    world.scheduler.reset_device_cache()
    world.store.faults.delay_polls = lambda: 1000
    world.add("a", PROMPT if with_fetch else PROMPT[::-1], GREEDY)
    for _ in range(4):
        world.step()
    world.store.poison("rank 1 is gone")
    world.add("b", PROMPT, GREEDY)
    with pytest.raises(Poisoned, match="rank 1 is gone"):
        world.step()
    assert world.outcomes["a"].end.status == world.outcomes["b"].end.status == 503
    assert not (with_fetch and world.outcomes["a"].token_ids)
    assert world.scheduler.snapshot().pages_quarantined == num_pages
    world.scheduler.check()


def test_a_peer_executes_the_plans_it_is_sent_and_tells_its_gate():
    plans = queue.SimpleQueue()
    finished = []
    runners = [
        OracleRunner(CONFIG, OracleMemory(geometry, num_pages=SETTINGS.num_pages, num_row_slots=4), collective)
        for geometry, collective in zip(CONFIG.geometries(2, PAGE), thread_collectives(2), strict=True)
    ]

    class Gate(NoGate):
        def step_finished(self, step):
            finished.append(step)

    def serve_peer():
        loop = PeerLoop(runners[1], gate=Gate())
        while (data := plans.get()) is not None:
            loop.execute(data)

    peer = threading.Thread(target=serve_peer, daemon=True)
    peer.start()
    serving = Serving(runners[0], send_plan=lambda plan: plans.put(encode_plan(plan)))
    serving.send(add("a"), Drain())
    text = serving.text_of("a")
    serving.join()
    plans.put(None)
    peer.join(20)
    assert text == oracle_text(CONFIG, PROMPT, GREEDY, world_size=2, page_tokens=PAGE)
    assert finished == list(range(1, 8))


def test_commands_and_events_travel_as_bytes():
    commands = [add("a"), CancelRequest("a"), ResetCache("r", Tier.DEVICE), Drain(), Stop()]
    assert decode_commands(encode_commands(commands)) == commands
    usage = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens={Tier.DISK: 2})
    events = [
        Tokens("a", (1, 2)),
        Finished("a", FinishReason.STOP, usage),
        Failed("b", "no"),
        CacheReset("r", Tier.DEVICE),
    ]
    assert decode_events(encode_events(events)) == events
    with pytest.raises(msgspec.ValidationError):
        decode_commands(encode_events(events))


def test_an_inbox_wakes_its_engine_for_store_events_and_for_commands():
    inbox = Inbox()
    for leave, expected in [(inbox.wake, []), (lambda: inbox.put([Stop()]), [Stop()])]:
        waiter = threading.Thread(target=lambda: inbox.wait(None), daemon=True)
        waiter.start()
        leave()
        waiter.join(20)
        assert not waiter.is_alive()
        assert inbox.drain() == expected


def test_metric_names_are_unique_and_prometheus_style():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.startswith("flare_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
