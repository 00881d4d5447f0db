"""Router replay: recorded experts ride with the tokens, and a mixture-of-experts Megatron model routes by them."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_megatron
import torch
import torch.distributed as dist
from layouts import told
from tiny_megatron import TinyMegatronWorker, batch_of, loss_of, megatron_on_cpu

from dataplane_core import connect, kv_first_write
from dataplane_core.batch import BatchedDataDict, stack_or_nest
from dataplane_core.errors import InvalidRequestError, MissingDataError
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN, LP_SEED_FIELDS, ROUTED_EXPERTS_FIELD
from dataplane_integrations import DataPlanePolicy
from dataplane_integrations.errors import WorkerFailedError
from dataplane_integrations.trainer.groups import InProcessWorkerGroup
from dataplane_integrations.trainer.router_replay import RoutingReplay, check_routed_experts, lay_out_routed_experts

LENGTHS = [5, 2, 7, 3]
IDS = [f"p{row}_g0" for row in range(len(LENGTHS))]
WIDTH = 8
EXPERTS, CHOSEN = 4, 2
LAYOUTS = {
    "one": {"experts": EXPERTS},
    "TP2": {"experts": EXPERTS, "tensor": 2, "sequence_parallel": True},
    "PP2": {"experts": EXPERTS, "pipeline": 2},
    "CP2": {"experts": EXPERTS, "context": 2},
}


def _recorded():
    """(N, S, L, k) int16: any experts, but none for a row's last token, which generation does not run; 0 beyond."""
    generator = torch.Generator().manual_seed(6)
    scores = torch.rand(len(LENGTHS), max(LENGTHS), tiny_megatron.LAYERS, EXPERTS, generator=generator)
    experts = scores.topk(CHOSEN, -1).indices.short()
    for row, length in enumerate(LENGTHS):
        experts[row, length - 1] = -1
        experts[row, length:] = 0
    return experts


def _batch(recorded=None):
    experts = {} if recorded is None else {ROUTED_EXPERTS_FIELD: recorded}
    return BatchedDataDict({**batch_of(LENGTHS, seed=5), **experts})


def test_rows_without_their_routing_are_refused_at_the_fetch(client, toy_worker):
    with DataPlanePolicy(InProcessWorkerGroup([toy_worker()]), client, router_replay=True) as policy:
        policy.prepare_step()
        meta = kv_first_write(_batch(), sample_ids=IDS, dp_client=client, partition_id="train")
        with pytest.raises(WorkerFailedError) as caught:
            policy.get_logprobs_from_meta(meta)
    assert isinstance(caught.value.__cause__, MissingDataError)
    assert "routed_experts" in caught.value.__cause__.message
    assert "required_fields=['routed_experts']" in (caught.value.__cause__.hint or "")


# --- the layout -------------------------------------------------------------------------------------------------------

SHORT = torch.arange(1, 17).view(2, 8, 1, 1)  # two rows of 8 tokens; the numbers name the tokens


def _laid_out(lengths, **layout):
    column = lay_out_routed_experts(SHORT, lengths, **layout)
    assert column.shape[2:] == (1, 1)
    return column[..., 0, 0].tolist()


def test_rows_side_by_side_or_packed_are_cut_for_context_parallelism_and_name_no_expert_beyond_their_length():
    bounds = torch.tensor([0, 4, 12], dtype=torch.int32)
    halves = [{"context_rank": rank, "context_size": 2} for rank in range(2)]
    assert _laid_out([3, 8]) == [[1, 2, 3, -1, -1, -1, -1, -1], [9, 10, 11, 12, 13, 14, 15, 16]]
    assert _laid_out([3, 8], **halves[0]) == [[1, 2, -1, -1], [9, 10, 15, 16]]
    assert _laid_out([3, 8], **halves[1]) == [[3, -1, -1, -1], [11, 12, 13, 14]]
    assert _laid_out([3, 6], cu_seqlens_padded=bounds) == [[1, 2, 3, -1, 9, 10, 11, 12, 13, 14, -1, -1]]
    # each row is cut by itself
    assert _laid_out([3, 6], cu_seqlens_padded=bounds, **halves[0]) == [[1, -1, 9, 10, -1, -1]]
    assert _laid_out([3, 6], cu_seqlens_padded=bounds, **halves[1]) == [[2, 3, 11, 12, 13, 14]]


@pytest.mark.parametrize(
    ("lengths", "layout", "reason"),
    [
        ([3], {}, "2 rows, 1 lengths and 3 bounds"),
        ([3, 9], {}, "row 1 has 9 tokens, and room for 8"),
        ([3, 4], {"cu_seqlens_padded": [0, 2, 6]}, "row 0 has 3 tokens, and room for 2"),
        ([3, 4], {"cu_seqlens_padded": [0, 3, 7], "context_size": 2}, "room for 3 tokens. Expected a multiple of 4"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(lengths, layout, reason):
    with pytest.raises(InvalidRequestError, match=reason):
        lay_out_routed_experts(SHORT, lengths, **layout)


# --- what is refused --------------------------------------------------------------------------------------------------


class Stage(torch.nn.Module):
    """A pipeline stage of a model of two layers, of which the first has experts."""

    def __init__(self, layer, experts=EXPERTS):
        super().__init__()
        self.config = SimpleNamespace(
            num_layers=2,
            num_moe_experts=experts,
            moe_layer_freq=[1, 0],
            moe_router_topk=CHOSEN,
            moe_router_fusion=False,
            moe_router_load_balancing_type="none",
            recompute_granularity=None,
            pipeline_model_parallel_size=2,
            sequence_parallel=True,
        )
        self.layer = torch.nn.Linear(1, 1)
        self.layer.layer_number = layer


def _refusals(rank):
    known = torch.tensor([[0, 1], [2, 3], [1, 0], [-1, -1], [-1, -1]]).view(1, 5, 1, 2)
    gap, half = known.clone(), known.clone()
    gap[0, 1] = -1
    half[0, 2, 0, 1] = -1
    jagged = torch.nested.nested_tensor_from_jagged(torch.cat([known[0, :4], gap[0, :3]]), torch.tensor([0, 4, 7]))
    bare, strict = RoutingReplay(Stage(2)), RoutingReplay(Stage(2), missing="refuse")
    bare.install(known)
    bare.install(None)
    bare.remove()

    calls = {
        "on a stage without experts": lambda: bare.check(known),
        "in a model without experts": lambda: RoutingReplay(Stage(1, experts=None)),
        "routers that cannot be set": lambda: RoutingReplay(Stage(1)),
        "half": lambda: bare.check(half),
        "a gap, left to the router": lambda: bare.check(gap, [4]),
        "the last token": lambda: strict.check(known, [4]),
        "a gap": lambda: strict.check(gap, [4]),
        "a gap in jagged rows": lambda: strict.check(jagged),
        "installed unchecked": lambda: strict.install(half),
        "what to do": lambda: RoutingReplay(Stage(2), missing="fill"),
    }
    return {name: text for name, call in calls.items() if (text := told(call)[2])}


REFUSALS = {
    "in a model without experts": "no mixture-of-experts layers",
    "routers that cannot be set": "no mixture-of-experts layers whose experts can be set",
    "half": "row 0, token 2, layer 0 names some experts and lacks others: [1, -1]",
    "a gap": "row 0, token 1, layer 0 names no expert: [-1, -1]",
    "a gap in jagged rows": "row 1, token 1, layer 0 names no expert",
    "what to do": "missing must be one of 'router', 'refuse', got 'fill'",
}


def test_routes_are_checked_once_and_missing_ones_are_refused_only_if_told(ranks):
    [said] = ranks(1, _refusals, timeout_s=150)
    assert said.keys() == REFUSALS.keys()
    assert all(part in said[name] for name, part in REFUSALS.items())


def test_a_driver_checks_records_without_a_model_and_is_told_which_sample_is_wrong():
    sizes = {"num_layers": {2, 5}, "num_experts": 4, "top_k": 2}
    rows = [torch.tensor([[0, 1], [3, 2]]).expand(length, 2, 2).short() for length in (3, 1)]
    column = stack_or_nest(rows)
    check_routed_experts(column, [3, 1], sample_ids=["a", "b"], **sizes)
    check_routed_experts(column, **sizes)
    too_high = stack_or_nest([rows[0], torch.tensor([[[0, 1], [4, 2]]]).short()])
    for wrong, lengths, part in [
        (column, [3, 2], "sample 'b' has 2 tokens, and experts for 1"),
        (column, [2, 1], "sample 'a' has 2 tokens, and experts for 3"),
        (rows[0][None], [4], "sample 'a' has 4 tokens, and experts for 3"),
        (too_high, [3, 1], "sample 'b', token 0, layer 1 names an expert of 4 or above: [4, 2]"),
        (column, [3], "2 rows, 1 lengths and 1 sample ids"),
        (column.to(torch.uint8), [3, 1], "dtype torch.uint8"),
        (stack_or_nest([row[:, :1] for row in rows]), [3, 1], "2 or 5 layers, 2 experts"),
        (stack_or_nest([row[..., :1] for row in rows]), [3, 1], "2 or 5 layers, 2 experts"),
    ]:
        with pytest.raises(InvalidRequestError) as caught:
            check_routed_experts(wrong, lengths, sample_ids=["a", "b"][: len(lengths)], **sizes)
        assert part in str(caught.value)
    check_routed_experts(rows[0][None], [2], **sizes)  # padded


@contextmanager
def _alone(layout, recorded=None):
    """A worker, the client of a store of its own, and the rows in it."""
    with megatron_on_cpu(layout), connect({"backend": "noop"}) as client:
        worker = TinyMegatronWorker(layout)
        worker.setup_data_plane(client)
        yield worker, client, _write(client, "train", recorded)


def test_rows_are_checked_when_they_are_read(ranks):
    def read_wrong(rank):
        """Rows that name an expert twice."""
        with _alone(LAYOUTS["one"], torch.ones_like(_recorded())) as (worker, _, meta):
            check, checks = worker.routing_replay.check, []
            worker.routing_replay.check = lambda *args: (checks.append(1), check(*args))[1]
            return told(lambda: worker.get_logprobs_presharded(meta))[2], len(checks), len(worker.installed)

    [(said, checks, installs)] = ranks(1, read_wrong, timeout_s=150)
    assert "sample '" in said
    assert "token 0, layer 0 names an expert twice: [1, 1]" in said
    assert (checks, installs) == (1, 0)


def test_each_call_of_the_driver_begins_with_routers_that_choose_for_themselves(ranks):
    def begin_every_call(rank):
        """Per method that a worker runs, whether routers still had the experts of the call before."""
        with _alone(LAYOUTS["one"]) as (worker, _, meta):
            seen = []

            def replace(name, result):
                def note(*_, **__):
                    seen.append((name, any(layer.target is not None for layer in worker.routing_replay._layers)))
                    worker.routing_replay.install(_recorded())
                    return result

                setattr(worker, name, note)

            logprobs = torch.zeros(len(LENGTHS), worker._fetch(meta)["input_ids"].shape[1])
            replace("get_logprobs", {"logprobs": logprobs})
            replace("get_reference_policy_logprobs", {"reference_logprobs": logprobs})
            for name in ("train", "begin_train_step", "train_microbatch", "finish_train_step"):
                replace(name, {})
            worker.get_logprobs_presharded(meta)
            worker.get_reference_policy_logprobs_presharded(meta)
            worker.train_presharded(meta, None)
            worker.begin_train_step_presharded(None)
            worker.train_microbatch_presharded(meta)
            worker.train_microbatches_presharded([meta])
            worker.finish_train_step_presharded()
            return seen

    [seen] = ranks(1, begin_every_call, timeout_s=150)
    assert len(seen) == 7
    assert [name for name, installed in seen if installed] == []


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(config_of):
    """The driver's client of a private Redis server, with the rows and their recorded experts in it."""
    with connect(config_of("redis_store")) as client:
        yield client


def _write(client, partition_id, recorded):
    client.register_partition(partition_id, [], None, ["train"])
    meta = kv_first_write(_batch(recorded), sample_ids=IDS, dp_client=client, partition_id=partition_id)
    meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = WIDTH
    return meta


def _routers(worker):
    from megatron.core.transformer.moe.router import TopKRouter

    return [module for module in worker.model.modules() if isinstance(module, TopKRouter)]


def _choices(worker, run):
    """Per forward what the routers of this stage handed on: (B, S, L, experts) bool, of all TP ranks' tokens."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    maps = {}

    def keep(router, _, output):
        parts = [torch.empty_like(output[1]) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, output[1], group=group)
        maps.setdefault(router.layer_number, []).append(torch.cat(parts))

    hooks = [router.register_forward_hook(keep) for router in _routers(worker)]
    run()
    for hook in hooks:
        hook.remove()
    rows = [1 if worker.packed else 2] * len(next(iter(maps.values())))  # as many rows as in a microbatch
    return [
        torch.stack([maps[layer][forward].unflatten(0, (-1, count)).transpose(0, 1) for layer in sorted(maps)], dim=2)
        for forward, count in enumerate(rows)
    ]


def _route(rank, layout, config, metas):
    """Logprobs and a training step, padded and packed, by recorded experts; what was routed where."""
    with megatron_on_cpu(layout):
        return {way: _route_by(TinyMegatronWorker(layout, way == "packed"), config, metas[way]) for way in metas}


def _route_by(worker, config, meta):
    worker.setup_data_plane(config)
    meta.fields = list(_batch())
    own = _choices(worker, lambda: worker.get_logprobs(worker._fetch(meta), 2))
    meta = meta.with_fields([ROUTED_EXPERTS_FIELD])
    used = _choices(worker, lambda: worker.get_logprobs_presharded(meta, 2))
    trained_on, results = meta.with_fields(["prev_logprobs"]), []
    used += _choices(worker, lambda: results.append(worker.train_presharded(trained_on, loss_of, mbs=2)))
    worker.close_data_plane()
    layers = [router.layer_number - 1 for router in _routers(worker)]  # of this stage
    installed = [experts[:, :, layers] for experts in worker.installed]
    return {"own": own, "used": used, "installed": installed, "results": results}


def test_training_routes_as_recorded_although_the_router_would_choose_otherwise(ranks, store):
    logprobs, losses, norms = {}, [], []
    for name, layout in LAYOUTS.items():
        metas = {way: _write(store, f"{name}-{way}", _recorded()) for way in ("padded", "packed")}
        world = max(layout.get(axis, 1) for axis in ("tensor", "pipeline", "context"))
        seen_by = ranks(world, _route, layout, store.config, metas, timeout_s=150)
        for way in metas:
            replayed = otherwise = 0
            for seen in (rank[way] for rank in seen_by):
                assert len(seen["used"]) == len(seen["installed"]) == 2 * len(seen["own"]) == 4
                for forward, (used, installed) in enumerate(zip(seen["used"], seen["installed"], strict=True)):
                    known = (installed >= 0).all(-1)
                    wanted = torch.zeros_like(used).scatter(-1, installed.clamp(min=0).long(), True)
                    assert torch.equal(used[known], wanted[known]), f"{name}, {way}: routed as recorded"
                    own = seen["own"][forward % 2]
                    replayed += int(known.sum())
                    otherwise += int((own[known] != wanted[known]).any(-1).sum())
                    assert torch.equal(used.sum(-1), torch.full(used.shape[:-1], CHOSEN))
                    assert not bool(known.all()), "the last token of a row, and padding, were left to the router"
                losses.append(seen["results"][0]["global_loss"].item())
                norms.append(seen["results"][0]["grad_norm"].item())
            # of each row all tokens but the last, in both layers, in the logprob and the training forward; stages have
            # a layer each, context-parallel ranks a part of the tokens
            assert replayed == 2 * 2 * (sum(LENGTHS) - 4) * layout.get("tensor", 1)
            assert otherwise > sum(LENGTHS), "the router would choose otherwise for many"
        for way, meta in metas.items():
            stored = store.get_samples(meta.sample_ids, meta.partition_id, ["prev_logprobs"])["prev_logprobs"]
            logprobs[name, way] = stored.values()
    for found in logprobs.values():
        np.testing.assert_allclose(found, logprobs["one", "padded"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(losses, losses[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(norms, norms[0], rtol=0, atol=1e-5)


def _replay_own_choices(rank):
    """Replays what the routers chose in a forward, and has them choose otherwise afterwards."""
    with _alone(LAYOUTS["one"]) as (worker, client, meta):
        meta.fields = list(_batch())
        data = worker._fetch(meta)
        inside = torch.arange(WIDTH) < torch.tensor(LENGTHS).unsqueeze(1)

        def logprobs():
            return worker.get_logprobs(data)["logprobs"]

        def stored(name):
            return client.get_samples(meta.sample_ids, "train", [name])[name].values()

        def apart(one, other):
            return (one - other).abs().max().item()

        parts = []
        chosen = torch.cat(_choices(worker, lambda: parts.append(worker.get_logprobs(data, 2))))
        generated = parts[0]["logprobs"]
        experts = chosen.int().topk(CHOSEN, -1).indices.short()
        meta = _write(client, "train", experts[:, : max(LENGTHS)])
        meta.fields = [*LP_SEED_FIELDS, ROUTED_EXPERTS_FIELD]
        worker.get_logprobs_presharded(meta)
        assert apart(stored("prev_logprobs"), generated[inside]) <= 1e-6

        worker.replay.clear()
        with torch.no_grad():
            for name, parameter in worker.model.named_parameters():
                if "router" in name:
                    parameter.neg_()  # chooses those that it chose last
        drifted = logprobs()
        assert apart(drifted, generated) > 1e-2, "another router, another model"
        right = worker.installed[-1]
        beyond = right.clone()
        beyond[0, 1, 0, 0] = EXPERTS
        for refused, part in (
            (lambda: worker.replay.check(right.float()), "dtype torch.float32. Expected signed integers"),
            (lambda: worker.replay.check(beyond), "row 0, token 1, layer 0 names an expert of 4 or above"),
            (lambda: worker.replay.install(right[:, :, :1]), "Expected (rows, tokens, 2 layers, 2 experts)"),
            (lambda: (worker.replay.install(right[:, :4]), logprobs()), "sees 32 tokens, routed_experts holds 16"),
        ):
            assert part in told(refused)[2]
        worker.replay.clear()
        assert torch.equal(logprobs(), drifted)

        worker.get_logprobs_presharded(meta)  # replays, and leaves the experts of its last forward installed
        worker.get_reference_policy_logprobs_presharded(replace(meta, fields=list(LP_SEED_FIELDS)))
        assert apart(stored("prev_logprobs"), stored("reference_policy_logprobs")) > 1e-2
        assert torch.equal(stored("reference_policy_logprobs"), drifted[inside]), "its routers choose for themselves"
        worker.replay.remove()
        routers = [each for each in worker.model.modules() if hasattr(each, "router_replay")]
        assert all(router.router_replay is None for router in routers)


def test_own_choices_can_be_replayed_and_mistakes_are_refused(ranks):
    ranks(1, _replay_own_choices, timeout_s=150)
