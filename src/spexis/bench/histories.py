# SPDX-License-Identifier: Apache-2.0
"""The verdict rules against random histories, and each rule removed once.

    python -m spexis.bench.histories --n 100000      # make histories N=100000
    python -m spexis.bench.histories --seed 1234     # one group of histories again, alone

Every history must give plain decoding's text with nothing left behind (pipeline.py and
scheduler_sim.py say what is simulated and checked). Then each rule of engine/verdict.py is
removed in turn, and some history must break; and long undisturbed histories must run at the
law's rate. Invariant: a group of histories follows from its number alone, so a failure is
found again with --seed.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace

import torch
from tqdm import tqdm

from spexis.bench.pipeline import RULES, BrokenError, Pipeline
from spexis.bench.scheduler_sim import Group, History, random_history
from spexis.core.law import rows_per_token, tokens_per_step
from spexis.engine.verdict import FirstStage, LastStage, SlotTable

GROUP = 48  # histories that share a pipeline: one tensor operation serves all
STAGES = (2, 3, 4)


# ------------------------------------------------------------------ histories
@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The pipeline that a group of histories shares."""

    seed: int
    num_stages: int
    more_in_flight: int = 0  # steps in flight beyond one a stage
    stall: float = 0.0
    eager: float = 0.7
    hold: float = 0.0  # chance that the first stage leaves a row out


def random_setting(seed: int) -> Setting:
    r = Random(seed)
    num_stages = r.choice(STAGES)
    return Setting(
        seed=seed,
        num_stages=num_stages,
        more_in_flight=r.choice((0, 0, 1, num_stages)),
        stall=r.choice((0.0, 0.3)),
        eager=r.choice((0.3, 0.7, 1.0)),
        hold=r.choice((0.0, 0.0, 0.2, 0.6)),
    )


def run_group(
    histories: list[History],
    setting: Setting,
    rules: SimpleNamespace = RULES,
    max_calls: int = 20_000,
) -> Pipeline:
    """Runs the histories in one pipeline; raises BrokenError (or what the fault causes)."""
    pipeline = build(histories, setting, rules)
    pipeline.run(max_calls)
    return pipeline


def build(histories: list[History], setting: Setting, rules: SimpleNamespace = RULES) -> Pipeline:
    in_flight = setting.num_stages + setting.more_in_flight
    group = Group(histories, setting.num_stages, in_flight, rules)
    return Pipeline(
        num_stages=setting.num_stages,
        steps_in_flight=in_flight,
        scheduler=group,
        num_slots=group.num_slots,
        num_blocks=group.num_blocks,
        block_size=histories[0].block_size,
        seed=setting.seed,
        stall=setting.stall,
        eager=setting.eager,
        hold=setting.hold,
        rules=rules,
    )


def group_of(seed: int, size: int = GROUP) -> list[History]:
    return [random_history(seed * GROUP + i) for i in range(size)]


def failures_of(seed: int, size: int = GROUP) -> list[str]:
    """Runs a group; a history that breaks is taken out and the others run again."""
    histories, failures = group_of(seed, size), []
    while histories:
        try:
            run_group(histories, random_setting(seed))
            return failures
        except Exception as error:
            model = getattr(error, "model", None)
            broken = [h for h in histories if model is not None and h.seed == model.seed]
            failures.append(f"group {seed}, history {[h.seed for h in broken]}: {error!r}")
            if not broken:
                return failures
            histories.remove(broken[0])
    return failures


def _start_worker() -> None:
    torch.set_num_threads(1)


def run_many(number: int) -> list[str]:
    """`number` random histories on all cores; descriptions of those that failed."""
    full, rest = divmod(number, GROUP)
    jobs = [(seed, GROUP) for seed in range(full)] + ([(full, rest)] if rest else [])
    cores = len(os.sched_getaffinity(0))
    failures: list[str] = []
    context = multiprocessing.get_context("spawn")
    with (
        context.Pool(cores, initializer=_start_worker) as pool,
        tqdm(total=number, unit=" histories", smoothing=0.05, file=sys.stderr) as bar,
    ):
        for size, failed in pool.imap_unordered(_job, jobs):
            failures += failed
            bar.update(size)
            bar.set_postfix(failures=len(failures))
    return failures


def _job(job: tuple[int, int]) -> tuple[int, list[str]]:
    return job[1], failures_of(*job)


# ------------------------------------------------------------------ mutations
class _AnyPosition(LastStage):
    def judge(self, slots, positions, tokens, is_prefill, samples):
        return samples & (is_prefill | (tokens == self.token[slots]))


class _AnyToken(LastStage):
    def judge(self, slots, positions, tokens, is_prefill, samples):
        return samples & (is_prefill | (positions == self.position[slots]))


class _PrefillToo(LastStage):
    def judge(self, slots, positions, tokens, is_prefill, samples):
        return super().judge(slots, positions, tokens, torch.zeros_like(is_prefill), samples)


class _ChunksSample(LastStage):
    def judge(self, slots, positions, tokens, is_prefill, samples):
        return super().judge(slots, positions, tokens, is_prefill, torch.ones_like(samples))


class _NoExpect(LastStage):
    def expect(self, slots, positions, tokens, good):
        return torch.where(good, tokens, -1)


class _ExpectAll(LastStage):
    def expect(self, slots, positions, tokens, good):
        super().expect(slots, positions, tokens, torch.ones_like(good))
        return torch.where(good, tokens, -1)


class _DiscardsUnmarked(LastStage):
    def expect(self, slots, positions, tokens, good):
        super().expect(slots, positions, tokens, good)
        return tokens


class _NoRestart(FirstStage):
    def apply_verdict(self, slots, positions, tokens, alive):
        return super().apply_verdict(slots, positions, tokens, torch.zeros_like(alive))


class _NoGeneration(FirstStage):
    def apply_verdict(self, slots, positions, tokens, alive):
        return super().apply_verdict(slots, positions, tokens, torch.ones_like(alive))


class _BindKeepsGeneration(SlotTable):
    def bind(self, req_id, prefill_len):
        slot = super().bind(req_id, prefill_len)
        self.generation[slot] -= 1
        return slot


class _ShortMemory(FirstStage):
    def __init__(self, num_slots, num_stages, device):
        super().__init__(num_slots, num_stages - 3, device)  # N-1 positions


def _mutation(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(RULES), **changes})


MUTATIONS: dict[str, SimpleNamespace] = {
    "judge: position": _mutation(LastStage=_AnyPosition),
    "judge: token": _mutation(LastStage=_AnyToken),
    "judge: prefill rows are good": _mutation(LastStage=_PrefillToo),
    "judge: chunks sample nothing": _mutation(LastStage=_ChunksSample),
    "expect": _mutation(LastStage=_NoExpect),
    "expect: good rows only": _mutation(LastStage=_ExpectAll),
    "discards are NO_TOKEN": _mutation(LastStage=_DiscardsUnmarked),
    "restart": _mutation(FirstStage=_NoRestart),
    "restart: N positions remembered": _mutation(FirstStage=_ShortMemory),
    "generation": _mutation(FirstStage=_NoGeneration),
    "generation: of a resumed request": _mutation(SlotTable=_BindKeepsGeneration),
    "take back": _mutation(take_back=lambda request: None),
    "due: as early as the scheduler": _mutation(
        is_due=lambda plan, call, num_stages, num_ready: plan.call <= call - num_stages
    ),
}


def breaks(rules: SimpleNamespace, max_groups: int = 60, size: int = 6) -> str | None:
    """The first failure that these rules lead to, None if there is none."""
    for seed in range(max_groups):
        try:
            run_group(group_of(seed, size), random_setting(seed), rules, max_calls=5_000)
        except (BrokenError, IndexError, KeyError, AssertionError) as error:
            return f"group {seed}: {error!r}"
    return None


# ------------------------------------------------------------------------ law
@dataclass(frozen=True, slots=True)
class Rate:
    num_stages: int
    acceptance: float
    rows_per_token: float
    tokens_per_step: float

    @property
    def deviation(self) -> float:
        """The larger relative distance from the law."""
        rows = self.rows_per_token / rows_per_token(self.acceptance, self.num_stages)
        tokens = self.tokens_per_step / tokens_per_step(self.acceptance, self.num_stages)
        return max(abs(rows - 1), abs(tokens - 1))


def measure_rate(
    num_stages: int, acceptance: float, num_requests: int = 256, num_steps: int = 300
) -> Rate:
    """Undisturbed requests over a window that leaves out their start and their end."""
    warm_up = 4 * num_stages
    length = warm_up + num_steps + 2 * num_stages
    histories = [
        History(
            seed=seed,
            acceptance=acceptance,
            vocab_size=1000,
            num_requests=1,
            max_prompt=1,
            min_tokens=length,
            max_tokens=length,
            num_blocks=length,
            block_size=16,
            **dict.fromkeys(("stop", "stock", "hold", "abort", "preempt", "flush", "pause"), 0.0),
            arrive=1.0,
        )
        for seed in range(num_requests)
    ]
    pipeline = build(histories, Setting(seed=0, num_stages=num_stages, eager=1.0))
    before = (0, 0)
    for _ in pipeline.calls():
        if pipeline.num_judged == warm_up:
            before = pipeline.num_rows, pipeline.num_good
        if pipeline.num_judged == warm_up + num_steps:
            break
    rows, tokens = pipeline.num_rows - before[0], pipeline.num_good - before[1]
    return Rate(num_stages, acceptance, rows / tokens, tokens / num_steps / num_requests)


# ------------------------------------------------------------------------ main
def _progress(items, describe: Callable[[object], str]):
    with tqdm(list(items), file=sys.stderr) as bar:
        for item in bar:
            bar.set_description(describe(item))
            yield item


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--n", type=int, default=100_000, help="histories (default 100000)")
    what.add_argument("--seed", type=int, help=f"run this one group of {GROUP} and stop")
    parser.add_argument("--skip-mutations", action="store_true", help="only the histories")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    started = time.monotonic()
    if options.seed is not None:
        failures = failures_of(options.seed)
        print(*failures, sep="\n", file=sys.stderr)
        print(json.dumps({"name": "histories", "ok": not failures, "histories": GROUP}))
        return bool(failures)
    failures = run_many(options.n)
    seconds = time.monotonic() - started
    print(*failures[:20], sep="\n", file=sys.stderr)
    result = {
        "name": "histories",
        "ok": not failures,
        "histories": options.n,
        "failures": len(failures),
        "histories_per_second": round(options.n / seconds, 1),
    }
    if not options.skip_mutations:
        names = _progress(MUTATIONS, "without {}".format)
        found = {name: breaks(MUTATIONS[name]) for name in names}
        for name, failure in found.items():
            print(f"without {name}: {failure or 'NOTHING BREAKS'}", file=sys.stderr)
        result["rules_removed_that_fail"] = [name for name, failure in found.items() if failure]
        result["rules_removed_that_pass"] = [name for name in found if not found[name]]
        rates = list(_progress_rates())
        result["law_deviation"] = round(max(rate.deviation for rate in rates), 4)
        result["ok"] &= not result["rules_removed_that_pass"] and result["law_deviation"] <= 0.01
    print(json.dumps(result))
    return not result["ok"]


def _progress_rates() -> Iterator[Rate]:
    cases = [(n, p) for n in STAGES for p in (0.0, 0.5, 0.8, 1.0)]
    for num_stages, acceptance in _progress(cases, "law {}".format):
        random = 0.0 < acceptance < 1.0  # else a few requests show the same
        rate = measure_rate(num_stages, acceptance, num_requests=256 if random else 8)
        print(f"{rate}, {rate.deviation:.2%} from the law", file=sys.stderr)
        yield rate


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
