# SPDX-License-Identifier: Apache-2.0
"""SpexisScheduler itself, with vLLM's block pool and prefix cache, over the simulated pipeline.

The workers are those of spexis.bench.pipeline, so no model runs. Requests share prompts, so that
cached blocks are read again: a block that was hashed with a guess in it, or that a preemption gave
to another request too early, changes the text. Blocks are few, so that preemptions happen. At the
end every block that a prefix could hit must hold the tokens of its hash, on every stage.
"""

import json
from random import Random

import pytest
from llama_folder import llama_folder

from spexis.bench.pipeline import BrokenError, Pipeline, Row, Step, Target
from spexis.bench.tiny import steep_profile
from spexis.core.decisions import DECISIONS
from spexis.core.lengths import LengthModel
from spexis.core.mode import Mode
from spexis.core.outcomes import OutcomeChooser
from spexis.core.replay import replay_memory, replay_selection
from spexis.engine.verdict import NO_TOKEN
from spexis.observability.policy_state import STEPS, policy_state

pytestmark = pytest.mark.engine  # no engine starts, but vLLM is imported
BLOCK_SIZE = 2


@pytest.fixture(scope="module")
def make_config(tmp_path_factory):
    """VllmConfig for N stages, the way the plugin makes it."""
    folder = llama_folder(tmp_path_factory.mktemp("llama"), max_position_embeddings=128)

    def make(num_stages: int, steps_in_flight: int, policy: str, **more):
        from vllm.engine.arg_utils import EngineArgs

        from spexis import plugin

        plugin.register()
        block = {
            "drafter": {"method": "synthetic", "acceptance": 0.5},
            "steps_in_flight": steps_in_flight,
            **more,
        }
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            pipeline_parallel_size=num_stages,
            max_model_len=96,
            enforce_eager=True,
            scheduling_policy=policy,
            distributed_executor_backend="mp",
            additional_config={"spexis": block},
        ).create_engine_config()
        config.cache_config.block_size = BLOCK_SIZE
        plugin._take_back_env()
        return config

    from vllm.config import VllmConfig

    stock_steps = VllmConfig.__dict__["max_concurrent_batches"]
    yield make
    # The scheduler sets the number of steps in flight for its whole process.
    VllmConfig.max_concurrent_batches = stock_steps


class RealScheduler:
    """vLLM's scheduler with Spexis' rules as Pipeline wants it: one history."""

    switches = False
    """Whether speculation is switched off and on at random."""

    def __init__(self, config, seed: int, tight: bool = False):
        """tight: many requests, and blocks for little more than the longest of them."""
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from spexis.engine.scheduler import SpexisScheduler

        init_none_hash(sha256)
        self.vllm_hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.tokens_of: dict[bytes, list[int]] = {}  # block hash -> what the block must hold
        self.stages: list = []  # the pipeline's, set by run()
        self.random = r = Random(seed)
        self.target = Target(seed, r.randrange(2, 9), r.choice((0.0, 0.5, 0.8, 1.0)))
        self.num_blocks = r.randrange(30, 60)
        self.num_requests, self.num_arrived = r.randrange(2, 8), 0
        if tight:
            self.num_blocks, self.num_requests = r.randrange(30, 40), r.randrange(8, 16)
        self.resize()
        self.chances = {k: r.choice((0.0, 0.02, 0.1)) for k in ("abort", "flush")}
        self.flushes = 5
        self.arrive = r.choice((0.2, 1.0))
        self.prompts = [self._conversation(r.randrange(1, 10)) for _ in range(2)]
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        config.cache_config.num_gpu_blocks = self.num_blocks
        self.real = SpexisScheduler(
            config,
            kv_cache_config=KVCacheConfig(
                num_blocks=self.num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )
        self.real.max_num_scheduled_tokens = r.choice((3, 8, 64))
        most = 8 if tight else r.randrange(1, 5)
        self.real.max_num_running_reqs = self.real.max_num_active_reqs = most
        if self.real.lookahead is not None:
            self.real.lookahead.memory.lengths = LengthModel(prior_mean=12)
            self.real.lookahead.keep_journal()
        if self.real.chooser is not None:
            self.real.chooser.keep_journal()
        self.tables: dict[str, list[int]] = {}
        self.text: dict[str, list[int]] = {}
        self.num_calls = self.num_ended = self.num_aborted = self.num_hits = 0
        self.in_flight = 0
        self.switch = r.choice((0.0, 0.02, 0.2))  # chance that the mode changes, where it may
        self.opt_out = r.choice((0.0, 0.3))
        self.plain_gaps: list[int] = []  # steps between rows of requests that must not speculate
        self.last_row: dict[str, int] = {}
        self.journal: list[dict] = []

    def resize(self) -> None:
        """For histories of another size: before prompts and the block pool are made."""

    def _conversation(self, length: int) -> list[int]:
        """A prompt with its answer, so that other requests' prompts hold what one generates."""
        tokens = [self.random.randrange(self.target.vocab_size) for _ in range(length)]
        for _ in range(20):
            tokens.append(self.target.next(tokens))
        return tokens

    def hasher(self, request):
        begin = len(request.block_hashes)
        hashes = self.vllm_hasher(request)
        for i, block_hash in enumerate(hashes, begin):
            tokens = request.all_token_ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]
            self.tokens_of[block_hash] = list(tokens)
        return hashes

    @property
    def busy(self) -> bool:
        return self.num_arrived < self.num_requests or self.real.has_requests()

    def stuck(self) -> Target:
        return self.target

    def events(self) -> None:
        from vllm.v1.request import RequestStatus

        if self.num_arrived < self.num_requests and self.random.random() < self.arrive:
            self._arrive()
        if self.real.requests and self.random.random() < self.chances["abort"]:
            req_id = self.random.choice(list(self.real.requests))
            self.real.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
            self.num_aborted += 1

    def _arrive(self) -> None:
        from vllm.v1.request import Request

        r, req_id = self.random, str(self.num_arrived)
        shared = r.choice(self.prompts)
        prompt = shared[: r.randrange(1, len(shared) + 1)]
        if r.random() < 0.3:
            prompt = [*prompt, r.randrange(self.target.vocab_size)]
        params = self.params(prompt)
        self.text[req_id] = list(prompt)
        priority = r.randrange(3)  # looked at with that policy only
        self.real.add_request(
            Request(req_id, list(prompt), params, None, priority=priority, block_hasher=self.hasher)
        )
        self.num_arrived += 1

    def params(self, prompt: list[int]):
        from vllm import SamplingParams

        r = self.random
        stop = [r.randrange(self.target.vocab_size)] if r.random() < 0.2 else []
        return SamplingParams(
            temperature=0,
            max_tokens=r.randrange(1, 26),
            stop_token_ids=stop,
            ignore_eos=True,
            extra_args={"spexis_speculate": False} if r.random() < self.opt_out else None,
        )

    def schedule(self) -> Step:
        self.num_calls += 1
        self.events()
        if self.flushes and self.random.random() < self.chances["flush"]:
            self.flushes -= 1
            self.real.reset_prefix_cache(reset_running_requests=True)
        if self.switches and self.random.random() < self.switch:
            self.real.mode = Mode.PP if self.real.mode is Mode.SP else Mode.SP
        output = self.real.schedule()
        if self.real.lookahead is not None:
            self.journal += self.real.lookahead.take_journal()
        step = Step(call=self.num_calls, finished=sorted(output.finished_req_ids), origin=output)
        computed = {}
        for new in output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            self.num_hits += new.num_computed_tokens
            self.tables[new.req_id] = list(new.block_ids[0])
            step.bound.append((new.req_id, list(new.prompt_token_ids)))
        cached = output.scheduled_cached_reqs
        for req_id, blocks, count in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            computed[req_id] = count
            new_blocks = list(blocks[0]) if blocks else []
            if req_id in cached.resumed_req_ids:
                self.num_hits += count
                self.last_row.pop(req_id, None)  # its prompt runs again, at once
                self.tables[req_id] = new_blocks
                step.bound.append((req_id, list(cached.all_token_ids[req_id])))
            else:
                self.tables[req_id] = self.tables[req_id] + new_blocks
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            is_decode = req_id in output.spexis_rows
            if is_decode and self.real.requests[req_id].sampling_params.extra_args:
                assert not output.spexis_rows[req_id]
                call = self.num_calls
                self.plain_gaps.append(call - self.last_row.get(req_id, -(10**6)))
                self.last_row[req_id] = call
            table = self.tables[req_id]
            step.rows.append(
                Row(req_id, self.target, computed[req_id], num_tokens, table, is_decode, False)
            )
        if step.rows:
            step.number, step.num_ready = self.real.num_steps, output.spexis_num_verdicts
            self.in_flight += 1
            assert output.spexis_pipeline_full == (self.in_flight >= len(self.stages))
        return step

    def update(self, step: Step) -> None:
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        from spexis.engine.outputs import SpexisOutput

        result = EMPTY_MODEL_RUNNER_OUTPUT
        if step.rows:
            self.in_flight -= 1
            ids = [row.req_id for row in step.rows]
            result = SpexisOutput(
                held=frozenset(row.req_id for row in step.rows if row.held),
                req_ids=ids,
                req_id_to_index={req_id: i for i, req_id in enumerate(ids)},
                sampled_token_ids=[[t] if t != NO_TOKEN else [] for t in step.outputs],
            )
            result = self.with_predictions(step, result)
        for outputs in self.real.update_from_output(step.origin, result).values():
            for output in outputs.outputs:
                for token in output.new_token_ids:
                    text = self.text[output.request_id]
                    if token != self.target.next(text):
                        raise BrokenError(f"{output.request_id}: {token} after {text}")
                    text.append(token)
                self.num_ended += output.finish_reason is not None

    def with_predictions(self, step: Step, result):
        """For workers that run a length predictor."""
        return result

    def check_cached_blocks(self) -> None:
        """With the pipeline empty, whatever can be hit holds what its hash says."""
        from vllm.v1.core.kv_cache_utils import get_block_hash

        for block in self.real.kv_cache_manager.block_pool.blocks:
            if block.block_hash is None:
                continue
            tokens = self.tokens_of[get_block_hash(block.block_hash)]
            for stage in self.stages:
                if stage.kv[block.block_id] != tokens:
                    raise BrokenError(f"cached {tokens}, holds {stage.kv[block.block_id]}")

    def check_policies(self) -> None:
        """What people are shown, of an engine that has come to rest."""
        state = policy_state(self.real)
        if self.real.lookahead is None:
            assert state is None and self.real.counters.forecasts == 0
            return
        assert state.decisions["lookahead"] in DECISIONS["lookahead"]
        assert state.gauges["kv_tokens"] == 0
        assert not any(state.gauges[f"lookahead_kv_tokens/{steps}"] for steps in STEPS)

    def done(self) -> Step:
        self.check_cached_blocks()
        free = self.real.kv_cache_manager.block_pool.get_num_free_blocks()
        if self.real.requests or free != self.num_blocks - 1:  # one is vLLM's null block
            raise BrokenError(f"{len(self.real.requests)} requests left, {free} blocks free")
        if self.num_ended + self.num_aborted != self.num_requests:
            raise BrokenError("some requests got no end")
        return Step(call=self.num_calls + 1, finished=sorted(self.real.finished_req_ids))


def run(
    make_config,
    num_stages,
    more,
    seeds,
    policy="fcfs",
    switches=False,
    tight=False,
    hold=0.0,
    kind=RealScheduler,
    **block,
):
    """Histories by seed, each to its end; what happened in them, added up."""
    totals = dict.fromkeys(("preemptions", "hits", "discarded", "stale", "held", "plain"), 0)
    totals.update(waits=0, holds=0, evicts=0, replayed=0, forecasts=0, exceeded=0, bonus=0)
    config = make_config(num_stages, num_stages + more, policy, **block)
    for seed in seeds:
        scheduler = kind(config, seed, tight)
        scheduler.switches = switches
        pipeline = Pipeline(
            num_stages=num_stages,
            steps_in_flight=num_stages + more,
            scheduler=scheduler,
            num_slots=scheduler.num_requests,
            num_blocks=scheduler.num_blocks,
            block_size=BLOCK_SIZE,
            seed=seed,
            eager=(0.3, 0.7, 1.0)[seed % 3],
            hold=hold,
        )
        scheduler.stages = pipeline.stages
        pipeline.run(max_calls=5_000)
        counters = scheduler.real.counters
        totals["preemptions"] += counters.preemptions
        totals["discarded"] += counters.discarded_rows
        totals["stale"] += counters.stale_rows
        totals["held"] += counters.held
        totals["hits"] += scheduler.num_hits
        totals["forecasts"] += counters.forecasts
        totals["exceeded"] += counters.forecasts_exceeded
        scheduler.check_policies()
        totals["plain"] += len(scheduler.plain_gaps)
        journal = json.loads(json.dumps(scheduler.journal))
        assert replay_memory(journal, LengthModel(prior_mean=12)) == []
        totals["replayed"] += len(journal)
        if scheduler.real.chooser is not None:
            chosen = json.loads(json.dumps(scheduler.real.chooser.chooser.journal))
            assert replay_selection(chosen, OutcomeChooser) == []
            totals["bonus"] += sum(e["choose"][-1] is not None for e in chosen if "choose" in e)
            assert scheduler.real.chooser.chooser.requests == {}  # nothing of ended requests stays
        for entry in journal:
            totals["waits"] += entry.get("admit", 1) == 0
            totals["holds"] += bool(entry.get("hold"))
            totals["evicts"] += bool(entry.get("evict"))
        if hold and not scheduler.switches:
            assert counters.unrun_rows <= pipeline.num_held  # some came back stale
        assert counters.accepted <= counters.drafts
        assert min(scheduler.plain_gaps, default=num_stages) >= num_stages
        assert sum(scheduler.real.cadence.load) == 0
    return totals


@pytest.mark.parametrize(
    ("num_stages", "more", "policy"),
    [(2, 0, "fcfs"), (2, 1, "priority"), (3, 0, "fcfs"), (4, 4, "priority")],
)
def test_real_scheduler(make_config, num_stages, more, policy):
    totals = run(make_config, num_stages, more, range(30), policy=policy)
    for name in ("preemptions", "hits", "discarded", "stale", "plain"):
        assert totals[name] > 20, totals
    assert totals["held"] == totals["waits"] == totals["evicts"] == 0


@pytest.mark.parametrize(("num_stages", "more"), [(2, 0), (2, 1), (4, 1)])
def test_rows_held_by_the_first_stage(make_config, num_stages, more):
    """Rows that the scheduler planned and the first stage left out, at random."""
    totals = run(make_config, num_stages, more, range(30), hold=0.4)
    assert min(totals["held"], totals["discarded"], totals["preemptions"]) > 20, totals


@pytest.mark.parametrize(
    ("num_stages", "more", "lookahead"), [(2, 0, False), (2, 1, True), (4, 1, False)]
)
def test_rows_chosen_by_the_scheduler(make_config, tmp_path, num_stages, more, lookahead):
    chosen = {"mode": "sp-alpha", "selection": "scheduler", "lookahead": lookahead}
    profile = steep_profile(tmp_path / "steep.json", num_layers=4)
    totals = run(
        make_config, num_stages, more, range(30), tight=lookahead, profile=profile, **chosen
    )
    assert min(totals["held"], totals["discarded"], totals["preemptions"]) > 20, totals
    # Where requests wait for memory, those that end soon are favoured.
    assert (totals["bonus"] > 20) == lookahead, totals


@pytest.mark.parametrize(
    ("num_stages", "more", "lookahead"), [(2, 1, False), (2, 0, True), (3, 1, True), (4, 0, False)]
)
def test_speculation_switched_off_and_on(make_config, num_stages, more, lookahead):
    """At any moment, with rows of both kinds in flight, and with what look-ahead does."""
    totals = run(make_config, num_stages, more, range(30), switches=True, lookahead=lookahead)
    assert min(totals["preemptions"], totals["discarded"], totals["plain"]) > 20, totals


@pytest.mark.parametrize(("num_stages", "more"), [(2, 1), (4, 4)])
def test_lookahead_preempts_less_and_changes_no_token(make_config, num_stages, more):
    """Few blocks: requests are kept waiting, held and preempted, and end with the right text."""
    with_it = run(make_config, num_stages, more, range(20), tight=True, lookahead=True)
    without = run(make_config, num_stages, more, range(20), tight=True)
    assert with_it["waits"] > 50 and with_it["evicts"] > 0
    assert with_it["replayed"] > 500
    # Not a test of calibration: token budgets of 3 make requests slower than any forecast thinks.
    assert with_it["forecasts"] > max(10, 2 * with_it["exceeded"]), with_it
    assert without["forecasts"] == 0
    assert with_it["preemptions"] < 0.7 * without["preemptions"]


def test_counts_must_be_taken_back(make_config, monkeypatch):
    monkeypatch.setattr("spexis.engine.scheduler.take_back", lambda request: None)
    with pytest.raises((BrokenError, AssertionError)):
        run(make_config, 2, 0, range(40))
