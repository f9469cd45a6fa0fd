# SPDX-License-Identifier: Apache-2.0
"""Training of exit drafters and length predictors: data, the model's own answers, evaluation."""
