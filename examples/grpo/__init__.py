"""A GRPO training run that fits two CPU cores: a small transformer, real processes.

Read the modules in this order: `task` (what the model learns), `model`, `rollout` (generates the answers), `loss` and
`workers` (train on them), `data_path` (how tensors travel between them), `trainer` (the loop).
"""
