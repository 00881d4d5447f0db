"""A policy worker on a real `megatron.core` GPT model, on the CPU over gloo, in any layout that two cores bear.

Tests send it to other processes by value, and Megatron is imported there alone. What Megatron takes for granted and a
CPU lacks is replaced here and nowhere else: attention (its own for context parallelism and packing is Transformer
Engine's), and the places that ask for the CUDA device.

Shape legend: ``N`` rows, ``B`` rows of the model's input (1 when packed), ``S`` its tokens, ``s`` those of one
context-parallel rank, ``T`` tokens of all rows.
"""

import contextlib
import math
import zlib
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dataplane_core.batch import BatchedDataDict
from dataplane_integrations.trainer.megatron import MegatronDataPlaneMixin
from dataplane_integrations.trainer.router_replay import RoutingReplay, context_parallel_tokens, lay_out_routed_experts

VOCAB, WIDTH, HEADS, CONTEXT = 16, 16, 4, 16
LAYERS = 2
LEARNING_RATE = 0.1
PAD_MULTIPLE = 4

#: How the model is spread, in `initialize_model_parallel`'s and `TransformerConfig`'s words.
Layout = dict[str, Any]


def batch_of(lengths, seed):
    """Rows of these many random tokens with random advantages, right-padded with 0."""
    inside = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    generator = torch.Generator().manual_seed(seed)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(1, VOCAB, inside.shape, generator=generator) * inside,
            "input_lengths": torch.tensor(lengths),
            "token_mask": inside.float(),
            "sample_mask": torch.ones(len(lengths)),
            "advantages": torch.randn(inside.shape, generator=generator).where(inside, 0.0),
        }
    )


def loss_of(logprobs_ns, data, global_tokens):
    """A microbatch's part of the mean over all tokens of the step."""
    mask_ns = data["token_mask"] * data["sample_mask"].unsqueeze(1)
    ratio_ns = (logprobs_ns - data["prev_logprobs"]).exp()
    return -(ratio_ns * data["advantages"] * mask_ns).sum() / global_tokens


def microbatches(data, size=None):
    """By the plan where there is one; else of ``size`` rows."""
    if data.micro_batch_indices is None:
        yield from data.make_microbatch_iterator(size or data.size)
        return
    for index in range(len(data.micro_batch_indices)):
        yield from data.get_batch(index).make_microbatch_iterator_with_dynamic_shapes()


class _CpuForCuda(TorchFunctionMode):
    """Tensors that are asked for on "cuda" are made on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if kwargs and kwargs.get("device") == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def megatron_on_cpu(layout):
    """Megatron's model parallelism over the ranks that there are, ended on exit."""
    from megatron.core import jit

    jit.disable_jit_fuser()  # it would compile small functions with a C++ compiler
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.moe import moe_utils

    sizes = {f"{axis}_model_parallel_size": layout.get(axis, 1) for axis in ("tensor", "pipeline")}
    cuda = {"current_device": lambda: "cpu", "synchronize": lambda: None}
    # without Transformer Engine the routers look for a name that nobody has set
    gemm = mock.patch.object(moe_utils, "te_general_gemm", None, create=True)
    with mock.patch.multiple(torch.cuda, **cuda), gemm, _CpuForCuda():
        parallel_state.initialize_model_parallel(**sizes, context_parallel_size=layout.get("context", 1))
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def tokens_of_rank(bounds, rank, size):
    """The places in the whole sequence of what one context-parallel rank holds."""
    return torch.arange(bounds[-1]) if size == 1 else context_parallel_tokens(bounds, rank, size)


class SdpaAttention(torch.nn.Module):
    """Causal attention inside each row, over the tokens of all context-parallel ranks."""

    def __init__(self, config, **_):
        super().__init__()

    def forward(self, query, key, value, *_, **given):
        from megatron.core import parallel_state, tensor_parallel

        packed = given.get("packed_seq_params")
        rank = parallel_state.get_context_parallel_rank()
        size = parallel_state.get_context_parallel_world_size()
        if size > 1:
            over = {"tensor_parallel_output_grad": True, "group": parallel_state.get_context_parallel_group()}
            key = tensor_parallel.gather_from_sequence_parallel_region(key, **over)
            value = tensor_parallel.gather_from_sequence_parallel_region(value, **over)
        bounds = [0, key.shape[0]] if packed is None else packed.cu_seqlens_q.tolist()
        asking = tokens_of_rank(bounds, rank, size)
        asked = torch.cat([tokens_of_rank(bounds, other, size) for other in range(size)])
        row_of = torch.bucketize(torch.arange(bounds[-1]), torch.tensor(bounds[1:]), right=True)
        sees = (row_of[asking].unsqueeze(1) == row_of[asked]) & (asking.unsqueeze(1) >= asked)
        # (s, [B,] heads, D) to ([B,] heads, s, D)
        heads = [part.movedim(0, -2) for part in (query, key, value)]
        mixed = functional.scaled_dot_product_attention(*heads, attn_mask=sees)
        return mixed.movedim(-2, 0).flatten(-2).contiguous()


class Norm(torch.nn.LayerNorm):
    """Layer norm whose weights say that tensor-parallel ranks see different tokens; torch's own do not."""

    def __init__(self, config, hidden_size, eps):
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def make_model(layout):
    """This rank's part of a GPT model whose weights depend on their names alone: the same in every layout."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    experts = layout.get("experts")
    options = {"num_moe_experts": experts, "moe_router_topk": 2, "add_bias_linear": False} if experts else {}
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.get("tensor", 1),
        context_parallel_size=layout.get("context", 1),
        pipeline_model_parallel_size=layout.get("pipeline", 1),
        pipeline_dtype=torch.float32,
        sequence_parallel=layout.get("sequence_parallel", False),
        # the dispatcher that goes with variable lengths makes CUDA streams when there are experts
        variable_seq_lengths=not experts,
        moe_token_dispatcher_type="allgather" if experts else "alltoall",
        batch_p2p_sync=False,
        calculate_per_token_loss=True,
        **options,
    )
    spec = get_gpt_layer_local_spec(num_experts=experts)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    spec.submodules.self_attention.submodules.core_attention = SdpaAttention
    model = GPTModel(
        config,
        TransformerBlockSubmodules([spec] * get_num_layers_to_build(config), layer_norm=Norm),
        vocab_size=VOCAB,
        max_sequence_length=CONTEXT,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    first = get_transformer_layer_offset(config)
    rank, size = parallel_state.get_tensor_model_parallel_rank(), layout.get("tensor", 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
            whole = [n * size if axis == dim else n for axis, n in enumerate(parameter.shape)]
            for number in range(LAYERS):
                if name.startswith(f"decoder.layers.{number}."):
                    name = name.replace(f"layers.{number}.", f"layers.{number + first}.", 1)
                    break
            values = torch.randn(whole, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            values = 1 + 0.1 * values if name.endswith("norm.weight") else 0.3 * values
            parameter.copy_(values if dim is None else values.chunk(size, dim)[rank])
    return model


@dataclass
class _Step:
    """A split step that is open."""

    loss_fn: Any
    mbs: int | None
    parts: list[float] = field(default_factory=list)
    num_tokens: int = 0


class TinyMegatronTrainer:
    """One rank. It trains by Megatron's own schedules and data parallelism, inside `megatron_on_cpu`."""

    def __init__(self, layout, packed=False):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        self.packed = packed
        plain = make_model(layout)
        self.model = DistributedDataParallel(plain.config, DistributedDataParallelConfig(), plain)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, momentum=0.5)
        self.replay = self.routing_replay = RoutingReplay(self.model) if layout.get("experts") else None
        #: Per forward of a model with experts, what was installed, laid out as the model's input.
        self.installed: list[Tensor] = []
        self.counts: list[int] = []
        self._step: _Step | None = None

    # --- what the trainer calls ---------------------------------------------------------------------------------------

    def get_logprobs(self, data, micro_batch_size=None):
        width = data["input_ids"].shape[1]

        def keep(logprobs_ns, **_):
            return functional.pad(logprobs_ns, (0, width - logprobs_ns.shape[1]))

        parts = self._run_schedule(data, micro_batch_size, lambda part: keep, forward_only=True)
        return {"logprobs": torch.cat(parts)} if parts else None  # only the last stage has any

    def get_reference_policy_logprobs(self, data, micro_batch_size=None):
        """Those of the policy: its weights are the reference's before the first step."""
        result = self.get_logprobs(data, micro_batch_size)
        return result and {"reference_logprobs": result["logprobs"]}

    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        self.begin_train_step(loss_fn, gbs, mbs)
        self.train_microbatch(data)
        return self.finish_train_step()

    def begin_train_step(self, loss_fn, gbs=None, mbs=None):
        self._step = _Step(loss_fn, mbs)
        self.model.zero_grad_buffer()

    def train_microbatch(self, data):
        step = self._step
        assert step is not None

        def loss_of_part(part, logprobs_ns):
            total = step.loss_fn(logprobs_ns, part, 1.0)
            return total, part["token_mask"].sum().int(), total.item()

        step.parts += self._run_schedule(data, step.mbs, lambda part: partial(loss_of_part, part))
        step.num_tokens += int(data["token_mask"].sum())

    def finish_train_step(self):
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads

        step, self._step = self._step, None
        assert step is not None
        sums = torch.tensor([sum(step.parts), float(step.num_tokens)], dtype=torch.float64)
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        # Context-parallel ranks bring the gradients of their own tokens; those add up, so that one alone counts them.
        counted = step.num_tokens * (parallel_state.get_context_parallel_rank() == 0)
        # sums gradients over data and context parallelism, divides by the tokens, adds up sequence parallelism's parts
        finalize_model_grads([self.model], torch.tensor(counted, dtype=torch.int))
        for parameter in self.model.parameters():
            parameter.grad = parameter.main_grad
        norm = self._grad_norm()
        self.optimizer.step()
        self.optimizer.zero_grad()  # or Megatron would add what is in `grad` to `main_grad` in the next step
        if not parallel_state.is_pipeline_last_stage():
            return None
        return {
            "global_loss": (sums[0] / sums[1]).reshape(1),
            "grad_norm": norm.reshape(1),
            "all_mb_metrics": {"loss": step.parts},
        }

    def abort_train_step(self):
        self._step = None
        self.model.zero_grad_buffer()

    def gradients(self):
        """Those of the last step, of this rank's part of the weights."""
        return {name: parameter.main_grad.clone() for name, parameter in self.model.named_parameters()}

    def state(self):
        """The weights of this rank, and what the optimizer keeps for them."""
        kept = [value for state in self.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        return [value.detach().clone() for value in (*self.model.parameters(), *kept)]

    # --- inside -------------------------------------------------------------------------------------------------------

    def _run_schedule(self, data, size, reducer_of, *, forward_only=False):
        """Megatron's schedule over the microbatches; on the last stage what the reducers returned."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        parts = list(microbatches(data, size))
        self.counts.append(len(parts))

        def forward_step(of, model):
            part = next(of)
            inputs = _Inputs(part, self.packed)
            output = self._forward(model, part, inputs)
            reduce = reducer_of(part)
            return output, lambda logits, **given: reduce(inputs.logprobs(logits), **given)

        # what stages exchange: with experts, and so without variable lengths, all microbatches have this shape
        rows, tokens = _Inputs(parts[0], self.packed).ids.shape
        with torch.set_grad_enabled(not forward_only):
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(parts),
                model=self.model,
                num_microbatches=len(parts),
                seq_length=tokens,
                micro_batch_size=rows,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    def _forward(self, model, part, inputs):
        if self.replay is not None and "routed_experts" in part:
            self.installed.append(inputs.experts(part))
            self.replay.install(self.installed[-1])
        return model(
            inputs.take(inputs.ids), inputs.take(inputs.positions), None, packed_seq_params=inputs.packed_seq_params
        )

    def _grad_norm(self):
        from megatron.core import parallel_state

        counts_whole = parallel_state.get_tensor_model_parallel_rank() == 0
        squares = torch.zeros([])
        for parameter in self.model.parameters():
            if counts_whole or getattr(parameter, "tensor_model_parallel", False):
                squares += parameter.grad.square().sum()
        dist.all_reduce(squares, group=parallel_state.get_model_parallel_group())
        return squares.sqrt()


class TinyMegatronWorker(MegatronDataPlaneMixin, TinyMegatronTrainer):
    """The same with the data plane's entry points."""


class _Inputs:
    """A microbatch as the model takes it: rows side by side, or one after another when packed."""

    def __init__(self, data, packed):
        from megatron.core import parallel_state
        from megatron.core.packed_seq_params import PackedSeqParams

        ids_ns, lengths = data["input_ids"], data["input_lengths"].tolist()
        self._size = parallel_state.get_context_parallel_world_size()
        self._group = parallel_state.get_context_parallel_group()
        self._shape = ids_ns.shape
        self.packed_seq_params = None
        if packed:
            # room for what the largest of the tests' layouts divides a row by
            rooms = [math.ceil(length / PAD_MULTIPLE) * PAD_MULTIPLE for length in lengths]
            self._bounds = [0, *torch.tensor(rooms).cumsum(0).tolist()]
            cu_seqlens = torch.tensor(self._bounds, dtype=torch.int32)
            self.packed_seq_params = PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=max(rooms))
        else:
            rooms = [ids_ns.shape[1]] * len(lengths)
            self._bounds = [0, ids_ns.shape[1]]
        self._rooms, self._lengths = rooms, lengths
        self.ids = self.lay_out(ids_ns)
        self.positions = self.lay_out(torch.arange(CONTEXT).expand(len(lengths), -1))
        self._places = [tokens_of_rank(self._bounds, rank, self._size) for rank in range(self._size)]

    def lay_out(self, column):
        """A column (N, S) as (B, S): each row cut, or filled with 0, to its room."""
        rows = []
        for row, room in zip(column, self._rooms, strict=True):
            rows.append(functional.pad(row[:room], (0, max(0, room - len(row)))))
        return torch.stack(rows) if self.packed_seq_params is None else torch.cat(rows).unsqueeze(0)

    def take(self, laid_out):
        """What this context-parallel rank holds of it."""
        return laid_out[:, self._places[dist.get_rank(self._group)]]

    def experts(self, part):
        """The column of experts, as the library lays it out."""
        return lay_out_routed_experts(
            part["routed_experts"],
            part["input_lengths"],
            cu_seqlens_padded=None if self.packed_seq_params is None else self._bounds,
            context_rank=dist.get_rank(self._group),
            context_size=self._size,
        )

    def logprobs(self, logits_bsv):
        """(N, S) of all rows, on every tensor- and context-parallel rank, from this rank's logits."""
        from megatron.core import tensor_parallel

        following = self.take(functional.pad(self.ids[:, 1:], (0, 1)))
        logits_sbv = logits_bsv.transpose(0, 1).float().contiguous()
        chosen = -tensor_parallel.vocab_parallel_cross_entropy(logits_sbv, following.transpose(0, 1).contiguous())
        if self._size > 1:
            chosen = tensor_parallel.gather_from_sequence_parallel_region(
                chosen, tensor_parallel_output_grad=False, group=self._group
            )
        chosen_bs = chosen[torch.cat(self._places).argsort()].transpose(0, 1)
        rows = chosen_bs if self.packed_seq_params is None else chosen_bs[0].split(self._rooms)
        width = self._shape[1]
        aligned = [
            functional.pad(row[: length - 1], (1, width - length))
            for row, length in zip(rows, self._lengths, strict=True)
        ]
        return torch.stack(aligned)
