# SPDX-License-Identifier: Apache-2.0
"""For the Ray test: vLLM's CPU platform takes what `ray start --num-gpus` declares.

vLLM 0.32 asks the platform which of Ray's resources a worker takes; the CPU platform names none and
is refused. The executor itself needs nothing else of it. The attribute is set as the module is
imported, in every process, Ray's workers included.
"""

import importlib.abc
import importlib.machinery
import sys

MODULE = "vllm.platforms.cpu"


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module) -> None:
            load(module)
            module.CpuPlatform.ray_device_key = "GPU"

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
