# SPDX-License-Identifier: Apache-2.0
"""What a single request can ask of Spexis: SamplingParams.extra_args, by HTTP `vllm_xargs`.

    SamplingParams(extra_args={"spexis_speculate": False})
    {"model": ..., "messages": ..., "vllm_xargs": {"spexis_speculate": false}}

Invariant: a value that means nothing changes nothing, and is warned of once.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

logger = init_logger("vllm.spexis")

SPECULATE = "spexis_speculate"
# JSON's false may reach us as a number or a string, by vLLM's field type.
YES, NO = (True, 1, "true", "True", "1"), (False, 0, "false", "False", "0")


def speculates(request: Any) -> bool:
    """Whether guesses are run for this request; its own rows wait for verdicts otherwise."""
    params = request.sampling_params
    if params is None or not params.extra_args or SPECULATE not in params.extra_args:
        return True
    value = params.extra_args[SPECULATE]
    if value in NO:
        return False
    if value not in YES:
        logger.warning_once(
            "spexis_speculate is %r: allowed are true and false; taken as true", value
        )
    return True
