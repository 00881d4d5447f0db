"""The run of the GRPO example that the tests of this folder share; one torch thread, as the programs use."""

from grpo_runs import in_memory as in_memory, one_thread as one_thread
