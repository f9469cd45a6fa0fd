# SPDX-License-Identifier: Apache-2.0
"""The kernels against the rules, in a process of its own: TRITON_INTERPRET=1 must precede Triton.

    TRITON_INTERPRET=1 python tests/unit/fused_rules.py GROUPS
    python tests/unit/fused_rules.py GROUPS cuda        compiled, on a GPU

Runs random histories of the rules (spexis.bench.histories) with stages that do every step twice,
by verdict.py and by the kernel, and compare the whole state each time. The dtypes are those of
the V2 runner. Prints one JSON line: what was compared how often, and how often it mattered.
"""

import json
import sys
from collections import Counter
from types import SimpleNamespace

import torch

from spexis.bench.histories import group_of, random_setting, run_group
from spexis.bench.pipeline import RULES
from spexis.engine import kernels
from spexis.engine.verdict import NO_TOKEN, FirstStage, LastStage

CPU = torch.device("cpu")
DEVICE = torch.device(sys.argv[2] if len(sys.argv) > 2 else "cpu")  # where the kernels run
HIDDEN = 5
counts: Counter[str] = Counter()


def same(*pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    for mine, theirs in pairs:
        mine, theirs = mine.cpu(), theirs.cpu()
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), (mine, theirs)


def there(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copies where the kernels run."""
    return tuple(tensor.clone().to(DEVICE) for tensor in tensors)


class CheckedFirst(FirstStage):
    """What the kernel made of a copy must be what the rule made of the state."""

    def __init__(self, num_slots, num_stages, device):
        super().__init__(num_slots, num_stages, device)
        self.position = self.position.to(torch.int32)
        self.buffers = kernels.RowBuffers.allocate(num_slots + 3, num_slots, device)
        self.kept = torch.zeros(num_slots + 1, HIDDEN)
        self.kept_positions = torch.full((num_slots + 1,), -7)

    def _copy(self):
        position, token, planned = there(self.position, self.token, self.planned)
        return SimpleNamespace(
            position=position,
            token=token,
            planned=planned,
            num_remembered=self.num_remembered,
            dummy_slot=self.dummy_slot,
        )

    def _same(self, other) -> None:
        real = slice(0, self.dummy_slot)  # the rule may write anything to the dummy slot
        same(*((getattr(self, n)[real], getattr(other, n)[real]) for n in STATE))

    def apply_verdict(self, slots, positions, tokens, alive):
        copy = self._copy()
        kernels.apply_verdict(copy, *there(slots, positions, tokens, alive))
        wrong = super().apply_verdict(slots, positions, tokens, alive)
        self._same(copy)
        counts["apply_verdict"] += 1
        counts["wrong"] += int(wrong.sum())
        counts["dead"] += int((~alive).sum())
        counts["no_token"] += int((tokens == NO_TOKEN).sum())
        self._check_states(slots, positions, tokens, alive)
        return wrong

    def _check_states(self, slots, positions, tokens, alive) -> None:
        states = torch.rand(len(slots), HIDDEN)
        kept, kept_positions = self.kept.clone(), self.kept_positions.clone()
        for row, slot in enumerate(slots.tolist()):
            if alive[row] and tokens[row] != NO_TOKEN:
                kept[slot], kept_positions[slot] = states[row], positions[row] - 1
        mine = there(self.kept, self.kept_positions)
        kernels.keep_states(*there(slots, positions, tokens, alive, states), *mine)
        same(*zip(mine, (kept, kept_positions), strict=True))
        self.kept, self.kept_positions = kept, kept_positions

    def propose(self, slots, positions, guesses, samples):
        self._check_begin(slots, positions)
        copy = self._copy()
        kernels.propose(copy, *there(slots, positions, guesses, samples))
        super().propose(slots, positions, guesses, samples)
        self._same(copy)
        counts["propose"] += 1
        counts["no_sample"] += int((~samples).sum())

    def _check_begin(self, slots, positions) -> None:
        """On the rows of this step, with two padded ones."""
        prefill_len = torch.randint(0, 12, (self.dummy_slot,), dtype=torch.int32)
        ends, padded = positions.to(torch.int32), len(slots) + 2
        arguments, rows = (slots, ends, prefill_len), self.buffers
        theirs = kernels._begin_rows_reference(self, *arguments, rows, padded)
        mine = kernels.RowBuffers.allocate(padded, self.dummy_slot, DEVICE)
        mine.pad(0)  # so that a padded row which is not written shows
        result = kernels.begin_rows(self._copy(), *there(*arguments), mine, padded)
        same(*zip(result, theirs, strict=True))
        same(*((getattr(mine, n), getattr(rows, n)[:padded]) for n in rows.__slots__))
        counts["begin_rows"] += 1


class CheckedLast(LastStage):
    def __init__(self, num_slots, device):
        super().__init__(num_slots, device)
        self.position = self.position.to(torch.int32)

    def judge(self, slots, positions, tokens, is_prefill, samples):
        good = super().judge(slots, positions, tokens, is_prefill, samples)
        # What tells vLLM's runner a prompt row: fewer tokens computed than known.
        prefill_len = torch.zeros(self.dummy_slot, dtype=torch.int32)
        prefill_len[slots] = (self.position[slots] + is_prefill.int()).to(torch.int32)
        sampled = torch.randint(0, 99, (len(slots), 1))
        sent = torch.stack([positions, tokens]).to(torch.int32)
        position, token = there(self.position, self.token)
        stage = SimpleNamespace(position=position, token=token)
        counted = samples.to(torch.int32)
        num_sampled, num_rejected = there(counted, torch.zeros_like(counted))
        arguments = there(slots, sent, prefill_len, sampled)
        verdict = kernels.judge_rows(stage, *arguments, num_sampled, num_rejected)
        same(
            (num_sampled, good.to(torch.int32)),
            (num_rejected, (samples & ~good).to(torch.int32)),
            (verdict, torch.where(good, sampled[:, 0], NO_TOKEN)),
        )
        counts["judge_rows"] += 1
        counts["good"] += int(good.sum())
        counts["discarded"] += int((samples & ~good).sum())
        return good


STATE = ("position", "token", "planned")


def many_rows() -> None:
    """More rows than one program takes."""
    num_slots = 3 * kernels.ROWS_PER_PROGRAM
    torch.manual_seed(0)
    first = CheckedFirst(num_slots, 2, CPU)
    for step in range(3):
        slots = torch.randperm(num_slots)[: num_slots - 11]
        yes = torch.rand(len(slots)) < 0.9
        positions = torch.full_like(slots, 5 + step)
        guesses = torch.randint(0, 4, slots.shape)
        first.propose(slots, positions, guesses, yes)
        truth = torch.randint(NO_TOKEN, 4, slots.shape)
        first.apply_verdict(slots, positions, truth, yes)
    last = CheckedLast(num_slots, CPU)
    slots = torch.randperm(num_slots)
    yes = torch.ones(num_slots, dtype=torch.bool)
    last.expect(slots, torch.randint(1, 3, slots.shape, dtype=torch.int32), slots % 2, yes)
    last.judge(slots, torch.randint(1, 3, slots.shape), slots % 2, slots % 5 == 0, slots % 3 > 0)


def hashes() -> None:
    """hashed_tokens() where it is fused against the formula, which runs without Triton."""
    torch.manual_seed(0)
    positions, tokens = torch.randint(0, 1 << 17, (300,)), torch.randint(0, 128256, (300,))
    drawn, triton = torch.rand(300), kernels.triton
    for seed, vocab_size, drawn_or_none in ((0, 384, None), (7, 128256, drawn), (3, 2, drawn)):
        rest = seed, vocab_size
        mine = kernels.hashed_tokens(
            *there(positions.int(), tokens.int()),
            *rest,
            None if drawn_or_none is None else drawn.to(DEVICE),
            0.7,
        )
        kernels.triton = None
        theirs = kernels.hashed_tokens(positions, tokens, *rest, drawn_or_none, 0.7)
        kernels.triton = triton
        same((mine, theirs))
        assert theirs.min() >= 0 and theirs.max() < vocab_size
        counts["hashed_tokens"] += 1


def main() -> None:
    assert kernels.is_fused(torch.empty(0, device=DEVICE)), "needs Triton (TRITON_INTERPRET=1)"
    torch.set_num_threads(1)
    rules = SimpleNamespace(**{**vars(RULES), "FirstStage": CheckedFirst, "LastStage": CheckedLast})
    many_rows()
    hashes()
    for seed in range(int(sys.argv[1])):
        run_group(group_of(seed), random_setting(seed), rules)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
