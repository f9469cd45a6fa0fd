# SPDX-License-Identifier: Apache-2.0
"""Discrete events over the policies of core/: what is simulated is what runs."""
