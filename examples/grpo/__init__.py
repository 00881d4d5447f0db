"""A GRPO training run that fits two CPU cores: arithmetic, a small transformer, real processes.

Read the modules in this order: `task` (what is learned), `model`, `warm_start`, `rollout` (who writes the answers),
`loss` and `workers` (who learns from them), `data_path` (how tensors travel between them), `trainer` (the loop).
"""
