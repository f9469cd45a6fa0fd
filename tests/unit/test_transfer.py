# SPDX-License-Identifier: Apache-2.0
"""Stages send each other tensors of known shape: three processes over Gloo, no engine.

Each stage adds one to what it received and hands it on, as vLLM's worker drives it: sends of a
step are waited for at the start of the next. Batches grow and shrink, and the sender's tensors
are padded as CUDA graphs leave them.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from spexis.engine.transfer import ROWS, FixedTransfer, Schema, agree

STAGES, MAX_TOKENS, WIDTH = 3, 12, 4
STEPS = [
    (3, 3, 0),
    (7, 2, 1),
    (1, 1, 3),
    (12, 12, 0),
    (4, 4, 2),
    (5, 1, 0),
]  # tokens, rows, padding
DTYPE = torch.bfloat16
CPU = torch.device("cpu")
SCHEMA = Schema((("hidden_states", WIDTH, DTYPE), ("residual", WIDTH, DTYPE)))


def stage_output(step: int, num_tokens: int, num_rows: int, padding: int) -> dict:
    """What the first stage computes in this step."""
    base = torch.arange((num_tokens + padding) * WIDTH).view(-1, WIDTH) % 97 + step
    rows = torch.stack([torch.arange(num_rows), torch.arange(num_rows) + 100 * step])
    tensors = {"residual": (base + 1).to(DTYPE), "hidden_states": base.to(DTYPE)}
    return {**tensors, ROWS: rows.to(torch.int32)}


def run_stage(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=STAGES
    )
    group = SimpleNamespace(
        cpu_group=dist.group.WORLD,
        device_group=None,
        rank_in_group=rank,
        ranks=list(range(STAGES)),
        world_size=STAGES,
    )
    assert agree(group, SCHEMA)
    assert not agree(group, SCHEMA if rank else None)
    assert not agree(group, None)
    assert not agree(group, Schema(SCHEMA.tensors[:1]) if rank == 2 else SCHEMA)
    buffers = None
    if rank:
        buffers = {name: torch.zeros(MAX_TOKENS, WIDTH, dtype=DTYPE) for name, *_ in SCHEMA.tensors}
    transfer = FixedTransfer.install(group, SCHEMA, buffers, CPU)
    sends: list = []
    for step, (num_tokens, num_rows, padding) in enumerate(STEPS):
        for handle in sends:
            handle.wait()
        transfer.expect(num_tokens, num_rows)
        tensors = stage_output(step, num_tokens, num_rows, padding)
        if rank:
            received, handles, afterwards = group.irecv_tensor_dict(all_gather_group=None)
            for handle in handles:
                handle.wait()
            assert afterwards == []
            for name in buffers:
                # In place, so that vLLM's copy into the stage's inputs moves nothing.
                assert received[name].data_ptr() == buffers[name].data_ptr()
                wanted = tensors[name][:num_tokens] + (rank - 1)
                assert torch.equal(received[name][:num_tokens], wanted), (step, name)
            assert torch.equal(received[ROWS], tensors[ROWS])
            tensors = {
                **{name: received[name][: num_tokens + padding] + 1 for name in buffers},
                ROWS: received[ROWS],
            }
        if rank + 1 < STAGES:
            sends = group.isend_tensor_dict(tensors, all_gather_group=None)[1:]
    for handle in sends:
        handle.wait()
    dist.barrier()
    dist.destroy_process_group()


def test_three_stages_over_gloo(tmp_path):
    mp.start_processes(
        run_stage, args=(str(tmp_path),), nprocs=STAGES, start_method="spawn", join=True
    )


def test_schema_of_a_model():
    def make_empty(batch_size, dtype, device):
        shape = batch_size, WIDTH
        names = ("residual", "hidden_states")
        return SimpleNamespace(tensors={n: torch.zeros(shape, dtype=dtype) for n in names})

    model = SimpleNamespace(make_empty_intermediate_tensors=make_empty)
    assert Schema.of_model(model, DTYPE) == SCHEMA
    with pytest.raises(ValueError, match="3 dimensions"):
        Schema.of_tensors({"hidden_states": torch.zeros(1, 2, 3)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra": torch.zeros(3, WIDTH)}, "extra"),
        ({"residual": torch.zeros(2, WIDTH, dtype=DTYPE)}, "residual is"),
        ({"residual": torch.zeros(3, WIDTH + 1, dtype=DTYPE)}, "residual is"),
        ({"residual": torch.zeros(3, WIDTH)}, "float32"),
        ({ROWS: torch.zeros(2, 4, dtype=torch.int32)}, ROWS),
        ({ROWS: torch.zeros(2, 3)}, ROWS),
    ],
)
def test_what_the_other_side_does_not_wait_for_is_refused(change, words):
    tensors = stage_output(0, 3, 3, 0)
    SCHEMA.check(tensors, 3, 3)
    with pytest.raises(ValueError, match=words):
        SCHEMA.check({**tensors, **change}, 3, 3)
