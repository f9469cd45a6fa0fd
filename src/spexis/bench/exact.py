# SPDX-License-Identifier: Apache-2.0
"""Is the text with speculative parallelism that of stock vLLM at PP=1, token for token?

    python -m spexis.bench.exact                          # make exact: about 1,300 cases
    python -m spexis.bench.exact --parts scenarios        # one part of it
    python -m spexis.bench.exact --parts law,bfloat16     # rows per token; ties in bfloat16

Parts, all greedy float32 unless a scenario samples with a seed:
  prompts    Spec-Bench prompts on the demo model: N = 2, 3, 4 x drafters (trained exit, always
             wrong, always right, right at random)
  families   a tiny random model of each family with an exit drafter of its own: N = 2, 3, 4
  scenarios  every feature in bench/scenarios.py, on roomy and on cramped engines, and on the demo
             model; after each all blocks must be free
A case is one prompt or scenario on one engine. Invariant: a case that did not run is no case, and
whatever differs, leaks or did not happen makes "ok" false.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from spexis.bench import tiny
from spexis.bench.compare import differences, problems
from spexis.bench.engines import (
    EngineRun,
    EngineSpec,
    Work,
    kill_on_signals,
    run_engine,
    write_oracle_file,
)
from spexis.bench.scenarios import SCENARIOS

DATA = Path("../shared/data/eval_specbench.jsonl")
PER_TASK = {  # 64 prompts; fewer of the tasks whose prompts are long
    "qa": 13,
    "mt_bench": 14,
    "translation": 14,
    "math_reasoning": 13,
    "summarization": 6,
    "rag": 4,
}
ACCEPTANCES = (0.0, 1.0, 0.6)  # always wrong, always right, right at random
WANTED_CASES = 700

ROOMY = {"max_model_len": 512, "block_size": 32, "num_gpu_blocks_override": 2048}
CRAMPED = {  # chunks of 64 tokens, preemptions, priorities
    "max_model_len": 512,
    "block_size": 32,
    "num_gpu_blocks_override": 29,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
    "scheduling_policy": "priority",
}
DEMO = {
    "max_model_len": 1024,
    "max_num_seqs": 64,
    "block_size": 32,
    "num_gpu_blocks_override": 1024,
}


class Exact:
    """Runs engines, counts cases, shows progress."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.folder = args, folder
        self.stages = [int(n) for n in args.stages.split(",")]
        self.cases = self.different = 0
        self.failures: list[str] = []
        self.notes: list[str] = []
        self.engines: list[dict] = []
        expected = expected_cases(args.parts, len(self.stages), args.prompts, args.tiny_prompts)
        self.bar = tqdm(total=expected, unit="case", file=sys.stderr, dynamic_ncols=True)

    # ------------------------------------------------------------------ engines
    def run(self, spec: EngineSpec, work: list[Work], previous=None) -> EngineRun:
        self.bar.set_description(spec.label)

        def show(event: dict) -> None:
            if event["event"] == "progress":
                self.bar.set_postfix_str(f"{event['name']} {event['done']}/{event['of']}")
            elif event["event"] == "started":
                self.bar.set_postfix_str("started")

        run = run_engine(spec, work, previous=previous, on_event=show, timeout=self.args.timeout)
        if run.error:
            self.fail(f"{run.error}")
        self.engines.append(
            {
                "engine": spec.label,
                "start_seconds": round(run.start_seconds, 1),
                "seconds": round(run.seconds, 1),
                "acceptance": {
                    name: _ratio(result["counters"])
                    for name, result in run.results.items()
                    if result["counters"]
                },
            }
        )
        return run

    def reference(self, spec: EngineSpec, work: list[Work]) -> dict[str, dict]:
        """Results of the stock engine; without them nothing can be compared."""
        run = self.run(spec, work)
        if run.error:
            raise RuntimeError(run.error)
        for item in work:
            self._check_run(spec.label, item, run.results[item.name])
        return run.results

    def compare(
        self, spec: EngineSpec, work: list[Work], stock: dict[str, dict], source=lambda name: name
    ) -> EngineRun:
        """Runs the work on the engine under test; source maps its name to the stock result's."""
        run = self.run(spec, work, previous=stock)
        for item in work:
            if item.name not in run.results:
                continue  # run.error says why, and "ok" is lost
            theirs, ours = stock[source(item.name)], run.results[item.name]
            scenario = _scenario(item)
            wrong = differences(scenario, theirs, ours)
            for line in wrong:
                self.fail(f"{spec.label}, {item.name}: {line}{_gap(theirs, line)}")
            self.cases += 1 if scenario else len(ours["rows"])
            self.different += min(1, len(wrong)) if scenario else len(wrong)
            self.bar.update(1 if scenario else len(ours["rows"]))
            self._check_run(spec.label, item, ours)
        if run.slots_left:
            self.fail(f"{spec.label}: {run.slots_left} slots leaked on a stage")
        return run

    def _check_run(self, label: str, item: Work, result: dict) -> None:
        for line in problems(_scenario(item), result):
            self.fail(f"{label}, {item.name}: {line}")

    def fail(self, line: str) -> None:
        self.failures.append(line)
        self.bar.write(f"FAIL {line}", file=sys.stderr)

    def note(self, line: str) -> None:
        self.notes.append(line)
        self.bar.write(line, file=sys.stderr)

    # -------------------------------------------------------------------- parts
    def prompts(self) -> None:
        from spexis.bench.prompts import BUILT_IN, chat_token_ids
        from spexis.demo_model import demo_model_dir

        model = demo_model_dir()
        texts = read_prompts(self.args.data, self.args.prompts)
        if texts is None:
            self.note(f"no {self.args.data}: {len(BUILT_IN)} built-in prompts instead")
            texts = list(BUILT_IN)
        ids = chat_token_ids(model, texts)
        rows = [{"prompt_token_ids": p, "params": {"max_tokens": self.args.tokens}} for p in ids]
        watched = [  # the stock run also says how close the two best tokens were
            {**row, "params": {**row["params"], "logprobs": 2}} for row in rows
        ]
        scenarios = [] if "scenarios" not in self.args.parts else scenario_work(size=4)
        stock = self.reference(
            EngineSpec(model=model, options=DEMO, chat=True),
            [Work(name="prompts", rows=watched), *scenarios],
        )
        _set_gaps(stock["prompts"])
        reference = write_oracle_file(self.folder / "demo.jsonl", stock)
        by_acceptance = [
            Work(name=f"prompts p={p}", rows=rows, prepare={"drafter": oracle(reference, p)})
            for p in ACCEPTANCES
        ]
        drafter = shipped_drafter(model)
        if drafter is None:
            self.note("skipped: the trained drafter, none is shipped for the demo model")
        for n in self.stages:
            # One engine for all drafters: it starts with the trained one, if there is one.
            features = scenarios if n == 2 else []
            own = [Work(name="prompts", rows=rows), *features] if drafter else []
            again = [  # a second time on one engine more comes from its prefix cache
                dataclasses.replace(item, name=f"{item.name} oracle", scenario=item.name)
                for item in features
                if not own or not SCENARIOS[item.name].same_cached_tokens
            ]
            spec = EngineSpec(
                model=model,
                stages=n,
                drafter=drafter or oracle(reference, 0.0),
                options=DEMO,
                chat=True,
            )
            self.compare(spec, [*own, *by_acceptance, *again], stock, lambda name: name.split()[0])

    def families(self) -> None:
        for family in tiny.FAMILIES:
            model, drafter = self.tiny(family)
            rows = tiny_rows(self.args.tiny_prompts)
            work = [Work(name="prompts", rows=rows)]
            stock = self.reference(EngineSpec(model=model, options=ROOMY), work)
            for n in self.stages:
                spec = EngineSpec(model=model, stages=n, drafter=drafter, options=ROOMY)
                run = self.compare(spec, work, stock)
                acceptance = _ratio(run.results["prompts"]["counters"]) if not run.error else 0.5
                if not 0.05 < (acceptance or 0) < 0.98:
                    self.fail(f"{spec.label}: acceptance {acceptance} proves little")

    def scenarios(self) -> None:
        model, drafter = self.tiny("llama")
        work = scenario_work(size=6)
        stock = self.reference(EngineSpec(model=model, options=ROOMY), work)
        reference = write_oracle_file(self.folder / "tiny.jsonl", stock)
        at_random = oracle(reference, 0.6)
        cramped = [item for item in work if not SCENARIOS[item.name].same_cached_tokens]
        profile = tiny.steep_profile(self.folder / "steep.json")
        chosen = {"mode": "sp-alpha", "profile": profile, "lookahead": True}
        engines = [
            # stages, drafter, other settings, engine options
            *((n, at_random, {}, CRAMPED) for n in self.stages),
            (2, at_random, {}, ROOMY),
            (2, drafter, {}, ROOMY),
            (2, drafter, {}, CRAMPED),
            (3, drafter, {}, CRAMPED),
            (2, at_random, {"steps_in_flight": 3}, CRAMPED),
            (3, at_random, {"steps_in_flight": 6}, CRAMPED),
            (2, {"method": "none"}, {}, CRAMPED),
            (2, drafter, chosen, CRAMPED),
            (3, at_random, chosen, CRAMPED),
            (2, at_random, {"mode": "auto", "lookahead": True}, CRAMPED),
        ]
        for n, block, settings, options in engines:
            spec = EngineSpec(
                model=model, stages=n, drafter=block, settings=settings, options=options
            )
            self.compare(spec, work if options is ROOMY else cramped, stock)

    def law(self) -> None:
        from spexis.bench.rows import measure

        self.tiny("llama")
        measure(self, self.stages)

    def bfloat16(self) -> None:
        from spexis.bench.rounding import measure

        measure(self)

    def tiny(self, family: str) -> tuple[str, dict]:
        """Folder of the tiny model, and the block of its exit drafter."""
        model, drafter = self.folder / f"tiny-{family}", self.folder / f"drafter-{family}"
        if not model.exists():
            tiny.tiny_model(family, model)
            tiny.tiny_drafter(model, drafter)
        return str(model), {"method": "exit", "model": str(drafter)}


def expected_cases(parts: list[str], stages: int, prompts: int, tiny_prompts: int) -> int:
    """About as many as there will be; for the progress bar."""
    features = len(SCENARIOS)
    counts = {
        "prompts": stages * prompts * (len(ACCEPTANCES) + 1)
        + (2 * features if "scenarios" in parts else 0),
        "families": stages * tiny_prompts * len(tiny.FAMILIES),
        "scenarios": (stages + 10) * features,
        "law": 0,
        "bfloat16": 16,
    }
    return sum(counts[part] for part in parts)


def oracle(reference: str, acceptance: float) -> dict:
    return {"method": "oracle", "reference": reference, "acceptance": acceptance}


def scenario_work(size: int) -> list[Work]:
    return [Work(name=name, size=size) for name in SCENARIOS]


def tiny_rows(count: int, max_tokens: int = 48) -> list[dict]:
    """Random prompts of 3 to 90 tokens."""
    import random

    rng = random.Random("families")
    return [
        {
            "prompt_token_ids": [rng.randrange(1, tiny.VOCAB) for _ in range(3 + 87 * i // count)],
            "params": {"max_tokens": max_tokens},
        }
        for i in range(count)
    ]


def read_prompts(path: Path, count: int) -> list[str] | None:
    """First turns, of all six tasks, the shortest of each; None where there is no such file."""
    if not path.is_file():
        return None
    by_task: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        by_task.setdefault(row["task"], []).append(row["prompt_turns"][0])
    texts = [
        text
        for task, share in PER_TASK.items()
        for text in sorted(by_task.get(task, []), key=len)[: max(1, share * count // 64)]
    ]
    return texts[:count]


def shipped_drafter(model: str) -> dict | None:
    """The block of the drafter in the package that was made for the model."""
    from spexis.config import ConfigError, DrafterConfig
    from spexis.drafters import resolve, served_model

    hf_config = json.loads((Path(model) / "config.json").read_text())
    try:
        resolve(DrafterConfig(method="exit"), served_model(model, hf_config, folder=model))
    except ConfigError:
        return None
    return {"method": "exit"}


def _scenario(item: Work):
    return None if item.rows is not None else SCENARIOS[item.scenario or item.name]


def _ratio(counters: dict) -> float | None:
    return round(counters["accepted"] / counters["drafts"], 3) if counters["drafts"] else None


def _set_gaps(result: dict) -> None:
    """Moves the stock run's logprobs out of the comparison, as gaps of the two best tokens."""
    for row in result["rows"]:
        for output in row["outputs"]:
            best = [sorted(p.values())[-2:] for p in output["logprobs"]]
            output["gaps"] = [values[1] - values[0] for values in best]
            output["logprobs"] = None


def _gap(stock: dict, line: str) -> str:
    """How close the stock engine's choice was where the texts part."""
    row, _, rest = line.removeprefix("row ").partition(": token ")
    if not rest:
        return ""
    gaps = stock["rows"][int(row)]["outputs"][0].get("gaps")
    return f" (two best tokens {gaps[int(rest.split()[0])]:.2g} apart)" if gaps else ""


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=DATA, help="Spec-Bench rows (JSON lines)")
    parser.add_argument(
        "--parts",
        default="scenarios,families,prompts",
        help="comma list of scenarios, families, prompts, law, bfloat16",
    )
    parser.add_argument("--stages", default="2,3,4", help="numbers of pipeline stages")
    parser.add_argument("--prompts", type=int, default=64, help="Spec-Bench prompts")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of their answers")
    parser.add_argument("--tiny-prompts", type=int, default=24, help="prompts for each family")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one engine")
    parser.add_argument("--report", type=Path, help="also write engines, failures and notes here")
    args = parser.parse_args(argv)
    args.parts = args.parts.split(",")
    unknown = [p for p in args.parts if not callable(getattr(Exact, p, None))]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    kill_on_signals()
    begin = time.monotonic()
    has_data = args.data.is_file()
    if "prompts" in args.parts and not has_data:
        print(f"exact: no Spec-Bench file at {args.data}: give --data PATH", file=sys.stderr)
    print("exact: about an hour in full on two cores", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="spexis-exact-") as folder:
        exact = Exact(args, Path(folder))
        for part in args.parts:
            try:
                getattr(exact, part)()
            except RuntimeError as error:  # the stock engine did not run
                exact.fail(f"part {part} stopped: {str(error).splitlines()[0]}")
        exact.bar.close()
    whole = set(args.parts) >= {"prompts", "families", "scenarios"}
    enough = exact.cases >= WANTED_CASES or not whole
    line = {
        "name": "exact",
        "ok": not exact.failures and enough and exact.cases > 0 and (has_data or not whole),
        "cases": exact.cases,
        "different": exact.different,
        "failures": len(exact.failures),
        "notes": exact.notes,
        "minutes": round((time.monotonic() - begin) / 60, 1),
    }
    if args.report:
        report = {**line, "engines": exact.engines, "failed": exact.failures}
        args.report.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(line))
    if "prompts" in args.parts and not has_data:
        return 2
    return 0 if line["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
