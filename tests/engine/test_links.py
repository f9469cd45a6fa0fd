# SPDX-License-Identifier: Apache-2.0
"""The link times of a profile, on the CPU: by torch.distributed, and vLLM's own group.

No engine runs, but vLLM is imported in three pairs of processes, which takes half a minute.
"""

import pytest
import torch
from vllm.platforms import current_platform

from spexis.bench import links

pytestmark = pytest.mark.engine


@pytest.mark.slow
def test_all_operations_are_timed():
    found = links.links("cpu", hidden_size=64, rows=[1, 4], num_devices=1, repeats=3)
    assert set(found) == {"gloo", "host"} and "tp_note" not in found["gloo"]
    assert 0 < found["host"]["describe"] < 1
    # vLLM's workers reduce through shared memory where their kernels can; then this has to as well.
    current_platform.import_kernels()
    can = hasattr(torch.ops._C, "init_shm_manager")
    assert found["gloo"]["tp_by"] == ("shared memory" if can else "gloo")
    for operation in ("send", "all_reduce", "tp_all_reduce"):
        times = found["gloo"][operation]
        assert set(times) == {"1", "4"} and all(0 < s < 1 for s in times.values())


def test_one_device_has_no_link_but_a_host():
    found = links.links("cuda", hidden_size=64, rows=[4], num_devices=1, repeats=3)
    assert set(found) == {"host"} and 0 < found["host"]["describe"] < 1
