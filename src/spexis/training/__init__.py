# SPDX-License-Identifier: Apache-2.0
"""Training of exit drafters: data, generation with the model itself, trainer, evaluation."""
