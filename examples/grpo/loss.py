"""The GRPO loss: a clipped policy gradient with a penalty for leaving the reference policy.

Shape legend: ``N`` answers, ``S`` padded sequence length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dataplane_core.batch import BatchedDataDict

__all__ = ["ClippedPolicyLoss", "group_advantages", "loss_mask"]


@dataclass(frozen=True)
class ClippedPolicyLoss:
    """Token-mean of the clipped policy loss plus ``kl_weight`` times the k3 estimate of the KL divergence.

    The mean is over the tokens of the **global** batch, so that a long answer weighs the same on whichever worker and
    in whichever microbatch it lands; the parts add up over microbatches and ranks.

    Attributes:
        clip_ratio: The policy ratio is clipped to ``1 +- clip_ratio``.
        kl_weight: Weight of the divergence from the reference policy.
    """

    clip_ratio: float = 0.2
    kl_weight: float = 0.005

    def __call__(
        self, logprobs_ns: Tensor, data: BatchedDataDict, global_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This microbatch's part of the global loss.

        Args:
            logprobs_ns: (N, S) float32, of the policy that is trained, with its graph.
            data: The microbatch, with ``prev_logprobs``, ``reference_policy_logprobs``, ``generation_logprobs``,
                ``advantages``, ``token_mask`` (each (N, S)) and ``sample_mask`` (N,).
            global_tokens: Scalar: answer tokens in the batch of all ranks.

        Returns:
            The loss, a scalar, and metrics, detached scalars. Sums of parts are global means.
        """
        mask_ns = loss_mask(data)

        def part(values_ns: Tensor) -> Tensor:
            return (values_ns * mask_ns).sum() / global_tokens

        ratio_ns = (logprobs_ns - data["prev_logprobs"]).exp()
        clipped_ns = ratio_ns.clamp(1.0 - self.clip_ratio, 1.0 + self.clip_ratio)
        advantages_ns = data["advantages"]
        policy_ns = -torch.minimum(ratio_ns * advantages_ns, clipped_ns * advantages_ns)

        # k3: exp(d) - d - 1 with d = reference - policy; unbiased, never negative, of low variance.
        away_ns = data["reference_policy_logprobs"] - logprobs_ns
        kl_ns = away_ns.exp() - away_ns - 1.0

        loss = part(policy_ns + self.kl_weight * kl_ns)
        metrics = {
            "kl": part(kl_ns),
            "clipped_fraction": part((ratio_ns != clipped_ns).float()),
            # How far the rollout's own numbers are from the workers': near 0 unless stale weights generated.
            "generation_logprob_error": part((data["generation_logprobs"] - data["prev_logprobs"]).abs()),
        }
        return loss, {name: value.detach() for name, value in metrics.items()}


def loss_mask(data: BatchedDataDict) -> Tensor:
    """(N, S) float32: 1 for the tokens that count, those of answers in samples that count."""
    mask_ns: Tensor = (data["token_mask"] * data["sample_mask"].unsqueeze(1)).float()
    return mask_ns


def group_advantages(rewards_n: Tensor, group_size: int) -> Tensor:
    """How much better each answer is than its group, the ``group_size`` consecutive answers to one prompt.

    Args:
        rewards_n: (N,) float32, N a multiple of ``group_size``.
        group_size: Answers per prompt.

    Returns:
        (N,) float32: (reward - mean) / standard deviation of the group; 0 where all rewards of a group are equal.
    """
    groups = rewards_n.view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    spread = groups.std(dim=1, correction=0, keepdim=True)
    return torch.where(spread > 0, centred / (spread + 1e-6), torch.zeros_like(centred)).view(-1)
