"""Router replay: in training, the mixture-of-experts layers of a Megatron model use the experts of generation.

If the routers choose other experts in training than in generation, the same weights act as another model. So the
rollout writes the experts that it used as the column ``routed_experts``, next to the tokens, and `RoutingReplay` makes
the routers use them. The weight of each expert still comes from the router, with its gradient.

Megatron's own ``RouterReplay`` is not used. It uses the same attribute, ``TopKRouter.router_replay``, but keeps the
routers of all models of a process (policy and reference policy) in one list, and needs experts for every token,
padding included.

Shape legend: ``B`` rows and ``S`` tokens of the model's input, ``L`` layers, ``k`` experts of a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dataplane_core.errors import InvalidRequestError, UnsupportedOperationError

__all__ = ["RecordedRouting", "RoutingReplay"]


class RoutingReplay:
    """Sets and records the experts that the routers of one model use. Runs in the worker's process.

    Args:
        model: This rank's part of the model: a Megatron module, wrapped or not, or the list of its chunks.

    Raises:
        UnsupportedOperationError: The model has no mixture-of-experts layers; or a router whose experts cannot be set;
            or activation recomputation in a pipeline, where a backward would use another microbatch's experts.
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module]) -> None:
        self._layers = [_LayerRouting(router) for router in _routers(model)]
        if not self._layers:
            raise UnsupportedOperationError(
                "router replay refused: the model has no mixture-of-experts layers on this rank. Expected a model made "
                "with num_moe_experts, and megatron-core 0.16.1 or newer."
            )
        config = self._layers[0].router.config
        if config.moe_router_fusion or config.moe_router_load_balancing_type == "sinkhorn":
            raise UnsupportedOperationError(
                "router replay refused: the model's routers choose in a fused kernel or by sinkhorn balancing, where "
                "nothing can be set. Expected moe_router_fusion=False and another moe_router_load_balancing_type."
            )
        if config.recompute_granularity is not None and config.pipeline_model_parallel_size > 1:
            raise UnsupportedOperationError(
                "router replay refused: with activation recomputation in a pipeline a backward pass would route by the "
                "experts of a later microbatch. Expected recompute_granularity=None, or no pipeline parallelism."
            )
        self._config = config
        self._moe_layers = _moe_layer_numbers(config)
        for layer in self._layers:
            layer.router.router_replay = layer

    def install(self, routed_experts: Tensor) -> None:
        """Sets the experts of the next forward. They stay until the next `install` or `clear`, so a backward pass that
        recomputes activations uses them too.

        In a forward step function, call this before the model.

        Args:
            routed_experts: (B, S, L, k) signed integers, in the layout of the ``input_ids`` (B, S) that this rank's
                model gets: packed, and cut for context parallelism, if they are. ``L`` is the model's
                mixture-of-experts layers in their order, or all of its layers. For a token with negative numbers the
                router chooses: use them for padding, and for tokens whose experts were not recorded.

        Raises:
            InvalidRequestError: Another shape or dtype, an expert that does not exist, or an expert named twice.
        """
        self._check(routed_experts)
        all_layers = routed_experts.shape[2] == self._config.num_layers
        for layer in self._layers:
            number = layer.router.layer_number
            column = number - 1 if all_layers else self._moe_layers.index(number)
            layer.target = self._as_router_sees(routed_experts[:, :, column])

    def clear(self) -> None:
        """Lets the routers choose again for all tokens."""
        for layer in self._layers:
            layer.target = None

    def remove(self) -> None:
        """Removes this object from the model's routers."""
        for layer in self._layers:
            layer.router.router_replay = layer.previous

    @contextlib.contextmanager
    def recording(self) -> Iterator[RecordedRouting]:
        """Records the experts that the routers use in one forward inside the block.

        Yields:
            The record; read it after that forward.
        """
        for layer in self._layers:
            layer.used, layer.records = None, True
        try:
            yield RecordedRouting(self._layers, self._moe_layers, self._sequence_parallel_group())
        finally:
            for layer in self._layers:
                layer.records = False

    # --- inside -------------------------------------------------------------------------------------------------------

    def _check(self, routed: Tensor) -> None:
        k, num_experts = self._config.moe_router_topk, self._config.num_moe_experts
        layers = sorted({len(self._moe_layers), self._config.num_layers})
        if routed.dim() != 4 or routed.shape[2] not in layers or routed.shape[3] != k:
            raise InvalidRequestError(
                f"routed_experts refused: shape {tuple(routed.shape)}. Expected (rows, tokens, "
                f"{' or '.join(map(str, layers))} layers, {k} experts), laid out as the model's input_ids."
            )
        if routed.dtype not in (torch.int8, torch.int16, torch.int32, torch.int64):
            raise InvalidRequestError(f"routed_experts refused: dtype {routed.dtype}. Expected signed integers.")
        ordered = routed.sort(-1).values
        known = ordered[..., 0] >= 0
        beyond = known & (ordered[..., -1] >= num_experts)
        twice = known & (ordered.diff(dim=-1) == 0).any(-1)
        for wrong, what in ((beyond, f"an expert of {num_experts} or above"), (twice, "an expert twice")):
            if wrong.any():
                row, token, layer = (int(place) for place in wrong.nonzero()[0])
                raise InvalidRequestError(
                    f"routed_experts refused: row {row}, token {token}, layer {layer} names {what}: "
                    f"{routed[row, token, layer].tolist()}. Expected {k} different experts of {num_experts}, or a "
                    "negative number where generation recorded none.",
                    hint="A column that was padded with 0 looks so; pad it with -1.",
                )

    def _sequence_parallel_group(self) -> dist.ProcessGroup | None:
        if not self._config.sequence_parallel:
            return None
        group: dist.ProcessGroup = self._layers[0].router.tp_group
        return group

    def _as_router_sees(self, routed_bsk: Tensor) -> Tensor:
        """One layer's experts (tokens, k): sequence first; with sequence parallelism, this rank's part of it."""
        routed_sbk = routed_bsk.transpose(0, 1)
        group = self._sequence_parallel_group()
        if group is not None:
            size = dist.get_world_size(group)
            if routed_sbk.shape[0] % size:
                raise InvalidRequestError(
                    f"routed_experts refused: {routed_sbk.shape[0]} tokens. Expected a multiple of {size}, which "
                    "sequence parallelism divides them by; lay them out as the model's input_ids."
                )
            routed_sbk = routed_sbk.chunk(size)[dist.get_rank(group)]
        return routed_sbk.reshape(-1, routed_sbk.shape[-1]).long()


class RecordedRouting:
    """The experts that the routers used in a forward; made by `RoutingReplay.recording`."""

    def __init__(
        self, layers: Sequence[_LayerRouting], moe_layers: Sequence[int], group: dist.ProcessGroup | None
    ) -> None:
        self._layers, self._moe_layers, self._group = layers, moe_layers, group

    def routed_experts(self, num_rows: int) -> Tensor:
        """The experts of every token. With sequence parallelism, collective over the tensor-parallel ranks.

        Args:
            num_rows: Rows of the model's input.

        Returns:
            (B, S, L, k) int16, in the layout of the model's ``input_ids``, with the mixture-of-experts layers in their
            order; -1 for layers of other pipeline stages.

        Raises:
            InvalidRequestError: No forward was made.
        """
        columns: dict[int, Tensor] = {}
        for layer in self._layers:
            if layer.used is None:
                raise InvalidRequestError("routed_experts refused: no forward was made while recording. Expected one.")
            used = layer.used.short()
            if self._group is not None:
                parts = [torch.empty_like(used) for _ in range(dist.get_world_size(self._group))]
                dist.all_gather(parts, used.contiguous(), group=self._group)
                used = torch.cat(parts)
            columns[layer.router.layer_number] = used.view(-1, num_rows, used.shape[-1]).transpose(0, 1)
        elsewhere = torch.full_like(next(iter(columns.values())), -1)
        return torch.stack([columns.get(number, elsewhere) for number in self._moe_layers], dim=2)


class _LayerRouting:
    """The object that Megatron's ``TopKRouter.router_replay`` expects, for one router."""

    def __init__(self, router: Any) -> None:
        self.router = router
        self.previous = router.router_replay
        #: (tokens, k): the experts to use, negative where the router chooses; None: it chooses for all tokens.
        self.target: Tensor | None = None
        #: (tokens, k): the experts used in the last forward that was recorded.
        self.used: Tensor | None = None
        self.records = False

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Megatron calls this instead of its top-k. Maps scores (tokens, experts) to values and indices (tokens, k)."""
        values, chosen = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.target is not None:
            if self.target.shape != chosen.shape:
                raise InvalidRequestError(
                    f"router replay refused: the router of layer {self.router.layer_number} sees {chosen.shape[0]} "
                    f"tokens, routed_experts holds {self.target.shape[0]}. Expected it laid out as the input_ids of "
                    "this very forward: install it before each."
                )
            target = self.target.to(scores.device)
            chosen = torch.where((target >= 0).all(-1, keepdim=True), target, chosen)
            values = scores.gather(1, chosen)
        if self.records:
            self.used = chosen.detach()
        return values, chosen


def _routers(model: nn.Module | Sequence[nn.Module]) -> list[Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    chunks = [model] if isinstance(model, nn.Module) else model
    return [
        module
        for chunk in chunks
        for name, module in chunk.named_modules()
        # routers of multi-token prediction get other tokens
        if isinstance(module, TopKRouter) and hasattr(module, "router_replay") and "mtp" not in name.split(".")
    ]


def _moe_layer_numbers(config: Any) -> list[int]:
    """Numbers, from 1, of the mixture-of-experts layers on all pipeline stages."""
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [number + 1 for number in range(config.num_layers) if number % frequency == 0]
    return [number + 1 for number, of_experts in enumerate(frequency) if of_experts]
