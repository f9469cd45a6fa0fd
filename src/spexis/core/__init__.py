# SPDX-License-Identifier: Apache-2.0
"""Policies and laws in plain Python: no torch, no vLLM, testable in milliseconds."""
