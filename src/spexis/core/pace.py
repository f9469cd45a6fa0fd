# SPDX-License-Identifier: Apache-2.0
"""How fast the engine goes now, from its own steps: what look-ahead needs where no profile is.

    pace = Pace(num_stages=2)
    pace.observe(seconds, tokens=30, running=40, prefill_tokens=0)     # a step came back
    pace.step_seconds, pace.tokens_per_second, pace.prefill_seconds_per_token

A step with prompt tokens gives the price of a prompt token: what it took longer than steps
without. All are means over about the last `memory` steps that say something about them.

Invariant: for any finite input every value is finite and positive.
"""

FIRST_PREFILL_SHARE = 0.01  # of a step, a token: before any prompt was seen beside decode rows


class Pace:
    def __init__(self, num_stages: int, memory: int = 200):
        self.num_stages, self.memory = num_stages, memory
        self.step_seconds = 0.05
        """Of a step without prompt tokens."""
        self._tokens, self._seconds = 0.0, 0.0  # of a step, prompts or not
        self.tokens_per_row_step = 1.0 / num_stages
        """Tokens that a running request returns in a step, 1/N to 1."""
        self._prefill = 0.0  # seconds a token
        self._seen = dict.fromkeys(("step", "all", "pace", "prefill"), 0)

    @property
    def tokens_per_second(self) -> float:
        return max(self._tokens / self._seconds, 1e-9) if self._seconds else 1.0

    @property
    def prefill_seconds_per_token(self) -> float:
        return self._prefill or FIRST_PREFILL_SHARE * self.step_seconds

    def observe(self, seconds: float, tokens: int, running: int, prefill_tokens: int = 0) -> None:
        """seconds: since the step before came back, with the pipeline busy in between.

        running: requests past their prompt.
        """
        if not 0 < seconds < float("inf") or running <= 0:
            return
        self._tokens = self._mean("all", self._tokens, tokens, count=False)
        self._seconds = self._mean("all", self._seconds, seconds)
        each = min(max(tokens / running, 1.0 / self.num_stages), 1.0)
        self.tokens_per_row_step = self._mean("pace", self.tokens_per_row_step, each)
        if not prefill_tokens:
            self.step_seconds = self._mean("step", self.step_seconds, seconds)
        elif self._seen["step"]:
            longer = max(seconds - self.step_seconds, 0.0) / prefill_tokens
            self._prefill = self._mean("prefill", self._prefill, longer)

    def described(self) -> dict[str, float]:
        return {
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_row_step": self.tokens_per_row_step,
            "prefill_seconds_per_token": self.prefill_seconds_per_token,
        }

    def _mean(self, name: str, old: float, new: float, count: bool = True) -> float:
        seen = self._seen[name] + 1
        if count:
            self._seen[name] = seen
        return old + (new - old) / min(seen, self.memory)
