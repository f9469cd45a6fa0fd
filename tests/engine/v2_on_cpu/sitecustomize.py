# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM's CPU build use Triton's interpreter: put this folder on PYTHONPATH.

vLLM turns Triton off on the CPU unless Triton has a "cpu" backend. Under TRITON_INTERPRET=1
kernels run as NumPy code and no backend is ever asked for anything, so a stand-in that says
"active" is enough. For tests of the V2 model runner only; without the variable it does nothing.

One gap of the interpreter (3.9) is filled: masks made of scalars and tensors (vLLM's grammar
kernel) come out as integers, which its store refuses; compiled Triton takes them.
"""

import os
import types

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.backends import backends
    from triton.runtime.interpreter import InterpreterBuilder

    class _Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    backends["cpu"] = types.SimpleNamespace(driver=_Driver, compiler=None)

    _create_masked_store = InterpreterBuilder.create_masked_store

    def create_masked_store(self, ptrs, value, mask, cache_policy):
        mask.data = mask.data.astype(bool)
        return _create_masked_store(self, ptrs, value, mask, cache_policy)

    InterpreterBuilder.create_masked_store = create_masked_store
