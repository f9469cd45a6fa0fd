# SPDX-License-Identifier: Apache-2.0
"""The kernels compile to machine code for Hopper, with the V2 runner's dtypes; needs no GPU.

The interpreter (test_kernels.py) takes Python that Triton's compiler does not.
"""

import importlib.util

import pytest

from spexis.engine import kernels

pytestmark = [
    pytest.mark.skipif(kernels.triton is None, reason="no Triton here (requirements/dev.lock)"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
    pytest.mark.skipif(kernels.INTERPRETED, reason="TRITON_INTERPRET=1 leaves nothing to compile"),
]

BLOCK = {"BLOCK": kernels.ROWS_PER_PROGRAM}
# Kernel -> types of its arguments (pointers are those of torch's dtypes), and its constants.
KERNELS = {
    "_apply_verdict_kernel": (
        "slots_ptr *i64, positions_ptr *i64, tokens_ptr *i64, alive_ptr *i1, position_ptr *i32, "
        "token_ptr *i64, planned_ptr *i64, num_rows i32",
        {"REMEMBERED": 4, "NONE": -1, **BLOCK},
    ),
    "_begin_rows_kernel": (
        "slots_ptr *i64, ends_ptr *i32, prefill_len_ptr *i32, position_ptr *i32, token_ptr *i64, "
        "sent_ptr *i32, positions_ptr *i64, row_slots_ptr *i64, row_start_ptr *i64, "
        "row_tokens_ptr *i64, row_ends_ptr *i64, row_is_prefill_ptr *i1, num_rows i32, "
        "num_padded i32, dummy_slot i32",
        BLOCK,
    ),
    "_propose_kernel": (
        "slots_ptr *i64, positions_ptr *i64, guesses_ptr *i64, samples_ptr *i1, position_ptr *i32, "
        "token_ptr *i64, planned_ptr *i64, num_rows i32",
        {"REMEMBERED": 4, **BLOCK},
    ),
    "_judge_kernel": (
        "slots_ptr *i64, sent_ptr *i32, sent_stride i32, prefill_len_ptr *i32, sampled_ptr *i64, "
        "sampled_stride i32, num_sampled_ptr *i32, num_rejected_ptr *i32, position_ptr *i32, "
        "token_ptr *i64, verdict_ptr *i64, num_rows i32",
        {"NONE": -1, **BLOCK},
    ),
    "_keep_states_kernel": (
        "slots_ptr *i64, positions_ptr *i64, tokens_ptr *i64, alive_ptr *i1, states_ptr *bf16, "
        "states_stride i32, kept_ptr *bf16, kept_stride i32, kept_positions_ptr *i64, size i32",
        {"NONE": -1, "BLOCK": kernels.VALUES_PER_PROGRAM},
    ),
    "_hashed_tokens_kernel": (
        "positions_ptr *i32, tokens_ptr *i32, drawn_ptr *fp32, result_ptr *i64, seed i32, "
        "vocab_size i32, acceptance fp32, num_rows i32",
        {"DRAWN": True, **BLOCK},
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_hopper(name, monkeypatch, tmp_path):
    if importlib.util.find_spec("triton.backends.nvidia") is None:
        pytest.skip("this Triton has no NVIDIA back end")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # so that it does compile
    kernel, (text, constants) = getattr(kernels, name), KERNELS[name]
    types = dict(argument.split() for argument in text.split(", "))
    names = kernel.arg_names
    assert set(names) == {*types, *constants}
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else types[n] for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
    )
    compiled = kernels.triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert len(compiled.asm["cubin"]) > 1000


def test_no_kernel_is_left_out():
    found = {name for name in dir(kernels) if name.endswith("_kernel")}
    assert found == set(KERNELS)
