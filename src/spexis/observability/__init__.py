# SPDX-License-Identifier: Apache-2.0
"""Seeing what the pipeline does: counters, Prometheus series, a log line, per-step JSONL.

counters.py        plain numbers, kept by the scheduler (engine core process)
iteration_log.py   one JSON line per scheduler step (engine core process, on request)
wire.py            carries the counters to the front end inside vLLM's own SchedulerStats
policy_state.py    what the policies see and last decided (engine core process)
stat_logger.py     spexis:* and vllm:spec_decode_* series, the log line (front-end process)
policy_series.py   the policies' gauges (front-end process)
scrape.py          two looks at a server's /metrics and their differences (any process)
snapshot.py        what `spexis top` shows of them
"""

from __future__ import annotations

import functools
from typing import Any


def install() -> None:
    """Front end: give engines that asked for Spexis a stat logger. Re-entrant.

    vLLM's `vllm.stat_logger_plugins` group is no door for us: it loads for every engine, turns
    statistics on where a user turned them off, and does not exist for the offline `LLM` class.
    """
    from vllm.v1.metrics.loggers import StatLoggerManager

    from spexis.config import SpexisConfig

    init = StatLoggerManager.__init__
    if getattr(init, "_spexis", False):
        return

    @functools.wraps(init)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        init(self, vllm_config, *args, **kwargs)
        if SpexisConfig.from_vllm(vllm_config) is not None:
            from spexis.observability.stat_logger import SpexisStatLogger

            # Last, since vLLM's own Prometheus logger clears the registry of "vllm:" series.
            self.stat_loggers.append(SpexisStatLogger(vllm_config, self.engine_indexes))

    __init__._spexis = True  # type: ignore[attr-defined]
    StatLoggerManager.__init__ = __init__
