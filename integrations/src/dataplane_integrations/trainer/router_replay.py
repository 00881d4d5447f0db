"""Router replay: in training, the mixture-of-experts layers of a Megatron model use the experts of generation.

The rollout writes the experts that it used as the column ``routed_experts``, next to the tokens, and `RoutingReplay`
makes the routers use them. The weight of each expert still comes from the router, with its gradient.

Megatron's own ``RouterReplay`` is not used. It uses the same attribute, ``TopKRouter.router_replay``, but keeps the
routers of all models of a process (policy and reference policy) in one list, and needs experts for every token,
padding included.

Shape legend: ``N`` rows as they were read, ``B`` rows and ``S`` tokens of the model's input, ``T`` tokens of all rows,
``L`` layers, ``k`` experts of a token.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dataplane_core.arguments import checked_as
from dataplane_core.codec import jagged_parts
from dataplane_core.errors import InvalidRequestError, UnsupportedOperationError

#: What becomes of a token that the rollout recorded no experts for: the ``router`` chooses them, or the rows are
#: refused (``refuse``). The last token of a row never has any: generation does not run it.
MissingRoutes: TypeAlias = Literal["router", "refuse"]

#: Stands for "no expert" in a column of experts.
_NONE: Final = -1


def lay_out_routed_experts(
    routed_experts: Tensor,
    lengths: Tensor | Sequence[int],
    *,
    cu_seqlens_padded: Tensor | Sequence[int] | None = None,
    context_rank: int = 0,
    context_size: int = 1,
) -> Tensor:
    """The experts of a microbatch's rows in the layout of the model's ``input_ids``, for `RoutingReplay.install`.

    Args:
        routed_experts: (N, S, L, k), padded.
        lengths: Tokens per row. What lies beyond is filled with -1.
        cu_seqlens_padded: With sequence packing, where the rows begin in the packed sequence, and its end: N + 1
            numbers, as in ``PackedSeqParams``. None: the rows are side by side.
        context_rank: This rank's place among the context-parallel ranks.
        context_size: Number of context-parallel ranks. Each gets the parts that `context_parallel_tokens` names.

    Returns:
        (N, S / context_size, L, k), or packed (1, T / context_size, L, k).

    Raises:
        InvalidRequestError: Sizes do not fit, or context parallelism does not divide a row's room.
    """
    counts = torch.as_tensor(lengths, device="cpu").tolist()
    num_rows, width = routed_experts.shape[:2]
    packed = cu_seqlens_padded is not None
    starts = (
        torch.as_tensor(cu_seqlens_padded, device="cpu").tolist()
        if packed
        else [row * width for row in range(num_rows + 1)]
    )
    if not len(counts) == num_rows == len(starts) - 1:
        raise InvalidRequestError(
            f"routed_experts refused: {num_rows} rows, {len(counts)} lengths and {len(starts)} bounds. Expected one "
            "length per row, and one bound more."
        )
    out = routed_experts.new_full((starts[-1], *routed_experts.shape[2:]), _NONE)
    for row, (start, end, length) in enumerate(zip(starts[:-1], starts[1:], counts, strict=True)):
        if not 0 <= length <= min(end - start, width):
            raise InvalidRequestError(
                f"routed_experts refused: row {row} has {length} tokens, and room for {min(end - start, width)}. "
                "Expected room for all of them."
            )
        out[start : start + length] = routed_experts[row, :length]
    laid_out = out.unsqueeze(0) if packed else out.view(num_rows, width, *out.shape[1:])
    if context_size == 1:
        return laid_out
    tokens = context_parallel_tokens(starts if packed else [0, width], context_rank, context_size)
    return laid_out[:, tokens.to(laid_out.device)]


def context_parallel_tokens(bounds: Sequence[int], rank: int, size: int) -> Tensor:
    """Which tokens of a sequence a context-parallel rank holds.

    Each row is cut into two parts per rank. A rank holds one from the front and one from the back, so that causal
    attention costs all ranks the same.

    Args:
        bounds: Where the rows begin, and the end of the last.
        rank: The rank's place.
        size: Number of context-parallel ranks.

    Raises:
        InvalidRequestError: A row cannot be cut into equal parts.
    """
    places = []
    for start, end in itertools.pairwise(bounds):
        part, rest = divmod(end - start, 2 * size)
        if rest:
            raise InvalidRequestError(
                f"context parallelism refused: a row has room for {end - start} tokens. Expected a multiple of "
                f"{2 * size}, two parts for each of the {size} ranks."
            )
        front, back = start + rank * part, end - (rank + 1) * part
        places += [torch.arange(front, front + part, device="cpu"), torch.arange(back, back + part, device="cpu")]
    return torch.cat(places) if places else torch.zeros(0, dtype=torch.int64, device="cpu")


class RoutingReplay:
    """Sets the experts that the routers of one model use. Runs in the worker's process.

    A pipeline stage without mixture-of-experts layers has nothing to set; all calls are allowed there too.

    Args:
        model: This rank's part of the model: a Megatron module, wrapped or not, or the list of its chunks.
        missing: What `check` does with tokens whose experts were not recorded.

    Raises:
        UnsupportedOperationError: The model has no mixture-of-experts layers; or a router whose experts cannot be set;
            or activation recomputation in a pipeline, where a backward would use another microbatch's experts.
        InvalidRequestError: ``missing`` is another word.
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module], missing: MissingRoutes = "router") -> None:
        self._missing: MissingRoutes = checked_as("RoutingReplay: missing", MissingRoutes, missing)
        config = model_config(model)
        self._layers = [_LayerRouting(router) for router in _routers(model)]
        self._moe_layers = _moe_layer_numbers(config) if getattr(config, "num_moe_experts", None) else []
        if not self._moe_layers or (not self._layers and _layer_numbers(model) & set(self._moe_layers)):
            raise UnsupportedOperationError(
                "router replay refused: the model has no mixture-of-experts layers whose experts can be set. Expected "
                "a model made with num_moe_experts, and megatron-core 0.16.1 or newer."
            )
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
        for layer in self._layers:
            layer.router.router_replay = layer

    def install(self, routed_experts: Tensor | None) -> None:
        """Sets the experts of the next forward. They stay until the next `install` or `clear`, so a backward pass that
        recomputes activations uses them too.

        In a forward step function, call this before the model. The experts' numbers are not checked here, but by
        `check`, once for all microbatches.

        Args:
            routed_experts: (B, S, L, k) signed integers, in the layout of the ``input_ids`` (B, S) that this rank's
                model gets, as `lay_out_routed_experts` makes it. ``L`` is the model's mixture-of-experts layers in
                their order, or all of its layers. For a token with negative numbers the router chooses. None: as
                `clear`.

        Raises:
            InvalidRequestError: Another shape or dtype.
        """
        if routed_experts is None:
            self.clear()
            return
        _check_form(routed_experts, self._num_layers(), self._config.moe_router_topk)
        all_layers = routed_experts.shape[2] == self._config.num_layers
        for layer in self._layers:
            number = layer.router.layer_number
            column = number - 1 if all_layers else self._moe_layers.index(number)
            layer.target = self._as_router_sees(layer.router, routed_experts[:, :, column])

    def check(
        self,
        routed_experts: Tensor,
        lengths: Tensor | Sequence[int] | None = None,
        sample_ids: Sequence[str] | None = None,
    ) -> None:
        """Checks whole rows as `check_routed_experts` does, with the sizes of the model. `MegatronDataPlaneMixin` calls
        it when it reads them.
        """
        check_routed_experts(
            routed_experts,
            lengths,
            num_layers=self._num_layers(),
            num_experts=self._config.num_moe_experts,
            top_k=self._config.moe_router_topk,
            missing=self._missing,
            sample_ids=sample_ids,
        )

    def clear(self) -> None:
        """Lets the routers choose again for all tokens."""
        for layer in self._layers:
            layer.target = None

    def remove(self) -> None:
        """Removes this object from the model's routers."""
        for layer in self._layers:
            layer.router.router_replay = layer.previous

    # --- inside -------------------------------------------------------------------------------------------------------

    def _num_layers(self) -> set[int]:
        """How many layers a column may have: the mixture-of-experts layers of the model, or all of its layers."""
        return {len(self._moe_layers), self._config.num_layers}

    def _as_router_sees(self, router: Any, routed_bsk: Tensor) -> Tensor:
        """One layer's experts (tokens, k): sequence first; with sequence parallelism, this rank's part of it."""
        routed_sbk = routed_bsk.transpose(0, 1)
        if self._config.sequence_parallel:
            size = dist.get_world_size(router.tp_group)
            if routed_sbk.shape[0] % size:
                raise InvalidRequestError(
                    f"routed_experts refused: {routed_sbk.shape[0]} tokens. Expected a multiple of {size}, which "
                    "sequence parallelism divides them by; lay them out as the model's input_ids."
                )
            routed_sbk = routed_sbk.chunk(size)[dist.get_rank(router.tp_group)]
        return routed_sbk.reshape(-1, routed_sbk.shape[-1]).long()


class _LayerRouting:
    """The object that Megatron's ``TopKRouter.router_replay`` expects, for one router."""

    def __init__(self, router: Any) -> None:
        self.router = router
        self.previous = router.router_replay
        #: (tokens, k): the experts to use, negative where the router chooses; None: it chooses for all tokens.
        self.target: Tensor | None = None

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
        return values, chosen


def check_routed_experts(
    routed_experts: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    num_layers: int | Collection[int],
    num_experts: int,
    top_k: int,
    missing: MissingRoutes = "router",
    sample_ids: Sequence[str] | None = None,
) -> None:
    """Checks that the experts that the rollout recorded fit the tokens of their samples and the model. Needs no model,
    so that a driver or a rollout process may call it before a sample is trained on.

    Args:
        routed_experts: (N, S, L, k) signed integers, padded or jagged, as they were read.
        lengths: Tokens per sample. A jagged row must have as many, a padded one no fewer. Default: what the rows hold.
        num_layers: The layers that the column must have; several numbers are allowed, such as the model's
            mixture-of-experts layers and all of its layers.
        num_experts: Experts of a layer.
        top_k: Experts of a token.
        missing: What becomes of tokens whose experts were not recorded.
        sample_ids: The samples, for the message. Default: they are named by their rows.

    Raises:
        InvalidRequestError: Another shape or dtype; a sample with more or fewer tokens than recorded ones; an expert
            that does not exist or is named twice; a token of which only some experts are known; or, if missing routes
            are refused, a token before the last without experts. The message names the first such sample.

    Examples:
        >>> recorded = torch.tensor([[[[0, 3]], [[1, 2]], [[-1, -1]]]])  # one sample, three tokens, one layer, top 2
        >>> check_routed_experts(recorded, [3], num_layers=1, num_experts=4, top_k=2)
    """
    num_layers = {num_layers} if isinstance(num_layers, int) else num_layers
    if routed_experts.is_nested:
        flat, offsets, _, _ = jagged_parts(routed_experts)
        rows = offsets.diff().tolist()
    else:
        rows = [routed_experts.shape[1]] * len(routed_experts) if routed_experts.dim() > 1 else []
        flat = routed_experts.flatten(0, 1) if routed_experts.dim() > 1 else routed_experts
    _check_form(flat.unsqueeze(0), num_layers, top_k, shown=routed_experts)
    counts = rows if lengths is None else torch.as_tensor(lengths, device="cpu").tolist()
    if len(counts) != len(rows) or (sample_ids is not None and len(sample_ids) != len(rows)):
        raise InvalidRequestError(
            f"routed_experts refused: {len(rows)} rows, {len(counts)} lengths and "
            f"{'no' if sample_ids is None else len(sample_ids)} sample ids. Expected one of each per row."
        )

    def name(row: int) -> str:
        return f"row {row}" if sample_ids is None else f"sample '{sample_ids[row]}'"

    for row, (held, count) in enumerate(zip(rows, counts, strict=True)):
        if held < count or (routed_experts.is_nested and held != count):
            raise InvalidRequestError(
                f"routed_experts refused: {name(row)} has {count} tokens, and experts for {held}. Expected experts for "
                f"each token, {_NONE} where generation recorded none."
            )
    ordered = flat.sort(-1).values
    known = ordered[..., 0] >= 0
    refusals = [
        (known & (ordered[..., -1] >= num_experts), f"an expert of {num_experts} or above"),
        (known & (ordered.diff(dim=-1) == 0).any(-1), "an expert twice"),
        (~known & (ordered[..., -1] >= 0), "some experts and lacks others"),
    ]
    if missing == "refuse":
        none = torch.zeros(0, dtype=torch.bool, device="cpu")
        of_rows = (torch.arange(held, device="cpu") < count - 1 for held, count in zip(rows, counts, strict=True))
        before_last = torch.cat([none, *of_rows])
        refusals.append((~known & before_last.to(known.device).unsqueeze(-1), "no expert"))
    for wrong, what in refusals:
        if wrong.any():
            at, layer = (int(place) for place in wrong.nonzero()[0])
            ends = list(itertools.accumulate(rows))
            row = bisect.bisect_right(ends, at)
            token = at - ends[row] + rows[row]
            raise InvalidRequestError(
                f"routed_experts refused: {name(row)}, token {token}, layer {layer} names {what}: "
                f"{flat[at, layer].tolist()}. Expected {top_k} different experts of {num_experts}, or "
                f"{_NONE} for all of them where generation recorded none.",
                hint="RoutingReplay(model, missing='router') lets the router choose for such tokens."
                if what == "no expert"
                else "A column that was padded with 0 looks so; pad it with -1.",
            )


def _check_form(routed: Tensor, num_layers: Collection[int], top_k: int, shown: Tensor | None = None) -> None:
    if routed.dim() != 4 or routed.shape[2] not in num_layers or routed.shape[3] != top_k:
        layers = " or ".join(map(str, sorted(num_layers)))
        raise InvalidRequestError(
            f"routed_experts refused: shape {tuple((routed if shown is None else shown).shape)}. Expected (rows, "
            f"tokens, {layers} layers, {top_k} experts), laid out as the model's input_ids."
        )
    if routed.dtype not in (torch.int8, torch.int16, torch.int32, torch.int64):
        raise InvalidRequestError(f"routed_experts refused: dtype {routed.dtype}. Expected signed integers.")


def model_config(model: Any) -> Any:
    """The config of a Megatron module, wrapped or not, or of the first of its chunks; None if it has none."""
    first = model[0] if isinstance(model, Sequence) and model else model
    while first is not None and not hasattr(first, "config"):
        first = getattr(first, "module", None)  # wrappers such as Float16Module
    return getattr(first, "config", None)


def _modules(model: nn.Module | Sequence[nn.Module]) -> Iterator[nn.Module]:
    """All modules but those of multi-token prediction, which get other tokens."""
    for chunk in [model] if isinstance(model, nn.Module) else model:
        yield from (module for name, module in chunk.named_modules() if "mtp" not in name.split("."))


def _routers(model: nn.Module | Sequence[nn.Module]) -> list[Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    return [part for part in _modules(model) if isinstance(part, TopKRouter) and hasattr(part, "router_replay")]


def _layer_numbers(model: nn.Module | Sequence[nn.Module]) -> set[int]:
    """Numbers, from 1, of the layers on this pipeline stage."""
    return {number for part in _modules(model) if (number := getattr(part, "layer_number", None)) is not None}


def _moe_layer_numbers(config: Any) -> list[int]:
    """Numbers, from 1, of the mixture-of-experts layers on all pipeline stages."""
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [number + 1 for number in range(config.num_layers) if number % frequency == 0]
    return [number + 1 for number, of_experts in enumerate(frequency) if of_experts]
