"""Random arrivals, cancels, faults and resets against tiny pools: every text equals the uncached one, nothing leaks."""

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule

from flare_core.engine.config import SchedulerConfig
from flare_core.engine.request import ResetCache
from flare_core.prefix import Tier
from flare_core.sampling import SamplingParams
from flare_core.testing.oracle_config import EOS_TOKEN, OracleConfig, PlaneSpec
from flare_core.testing.oracle_world import OracleWorld

PAGE = 4
PLANES = {
    "plain": (PlaneSpec(width=2),),
    "mixed": (
        PlaneSpec(name="kv", dtype="bfloat16", width=3, head_first=True),
        PlaneSpec(name="index", dtype="uint8", width=5, per_head=False),
        PlaneSpec(name="compressed", width=1, tokens_per_entry=2),
    ),
}


class EngineMachine(RuleBasedStateMachine):
    """The world under test; ids bundle what may be cancelled."""

    ids = Bundle("ids")

    @initialize(
        planes=st.sampled_from(sorted(PLANES)),
        with_rows=st.booleans(),
        with_store=st.sampled_from([False, True, True]),
        is_late=st.booleans(),
        lead=st.sampled_from([0, 1]),
        world_size=st.sampled_from([1, 1, 2]),
        num_pages=st.integers(4, 24),
        max_sequences=st.integers(1, 5),
        chunk=st.integers(1, 40),
        faults=st.randoms(use_true_random=False),
        fault_rate=st.sampled_from([0.0, 0.3]),
        max_delay=st.sampled_from([0, 6]),
    )
    def begin(
        self,
        planes,
        with_rows,
        with_store,
        is_late,
        lead,
        world_size,
        num_pages,
        max_sequences,
        chunk,
        faults,
        fault_rate,
        max_delay,
    ):
        config = OracleConfig(planes=PLANES[planes], row_bytes=10 if with_rows else 0, eos_bias=2.0)
        scheduler_config = SchedulerConfig(
            page_tokens=PAGE,
            num_pages=num_pages,
            max_sequences=max_sequences,
            max_model_len=64,
            vocab_size=config.vocab_size,
            set_fingerprint=bytes(32),
            has_rows=with_rows,
            num_row_snapshots=faults.choice([0, 1, 6]) if with_rows else 0,
            row_interval_tokens=faults.choice([0, 2 * PAGE]) if with_rows else 0,
            max_prefill_tokens=chunk,
            max_mixed_tokens=max(1, chunk // 2),
            min_tail_tokens=faults.choice([0, 3]),
        )
        self.world = OracleWorld(
            config, scheduler_config, world_size=world_size, lead=lead, with_store=with_store, is_late=is_late
        )
        if self.world.store is not None:
            hits = self.world.store.faults
            hits.delay_polls = lambda: faults.randint(0, max_delay)
            hits.lookup_polls = lambda: faults.choice([None, None, 0, 3])
            hits.copies_early = lambda: faults.random() < 0.5
            hits.drop_store = lambda: faults.random() < fault_rate
            hits.fail_store = lambda: faults.random() < fault_rate
            hits.keep_sections = lambda count: faults.randint(0, count) if faults.random() < fault_rate else count
        self.random = faults
        self.prompts = [[faults.randrange(3, 60) for _ in range(faults.randint(1, 30))] for _ in range(3)]

    @rule(
        target=ids,
        base=st.integers(0, 2),
        cut=st.integers(1, 30),
        extra=st.integers(0, 3),
        max_tokens=st.integers(1, 24),
        greedy=st.booleans(),
        logprobs=st.sampled_from([None, None, 0, 3]),
        prompt_logprobs=st.sampled_from([None, None, None, 2]),
        salt=st.sampled_from([b"", b"", b"other"]),
    )
    def add(self, base, cut, extra, max_tokens, greedy, logprobs, prompt_logprobs, salt):
        request_id = f"r{len(self.world.outcomes)}"
        prompt = self.prompts[base][:cut] + [self.random.randrange(3, 60) for _ in range(extra)]
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if greedy else 1.0,
            seed=cut,
            frequency_penalty=0.25,
            stop_token_ids=(EOS_TOKEN,),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        self.world.add(request_id, prompt, params, salt=salt)
        return request_id

    @rule(target=ids, request_id=ids, extra=st.integers(0, 3))
    def continue_conversation(self, request_id, extra):
        before = self.world.outcomes[request_id]
        prompt = [*before.prompt, *before.token_ids, *(self.random.randrange(3, 60) for _ in range(extra))]
        new_id = f"r{len(self.world.outcomes)}"
        self.world.add(new_id, prompt, SamplingParams(max_tokens=8, temperature=0.0))
        return new_id

    @rule(target=ids, request_id=ids, num_steps=st.integers(0, 3), is_cancelled=st.booleans())
    def repeat_from_the_store(self, request_id, num_steps, is_cancelled):
        before = self.world.outcomes[request_id]
        self.reset(Tier.DEVICE)
        new_id = f"r{len(self.world.outcomes)}"
        self.world.add(new_id, before.prompt, before.params)
        self.step(num_steps)
        if is_cancelled:
            self.world.cancel(new_id)
        return new_id

    @rule(request_id=ids)
    def cancel(self, request_id):
        self.world.cancel(request_id)

    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            self.world.step()

    @rule()
    def rest(self):
        self.world.run_until_rest(limit=5000)

    @rule(tier=st.sampled_from([Tier.DEVICE, Tier.MEMORY]))
    def reset(self, tier):
        self.world.engine.inbox.put([ResetCache("reset", tier)])

    def teardown(self):
        if hasattr(self, "world"):
            self.world.run_until_rest(limit=5000)


EngineMachine.TestCase.settings = settings(
    max_examples=50,
    phases=[Phase.generate, Phase.reuse],
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestEngineMachine = EngineMachine.TestCase
