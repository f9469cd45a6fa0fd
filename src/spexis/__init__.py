# SPDX-License-Identifier: Apache-2.0
"""Spexis: speculative parallelism for pipeline-parallel vLLM.

Importing this package must stay cheap and must never import vLLM or torch: vLLM loads the plugin
in every process of every user who has Spexis installed, asked for or not.
"""

__version__ = "0.1.0"
