"""What core does once for all backends: it checks arguments and replies, sets deadlines, and makes one hook call."""

import math
import pickle

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tensordict import TensorDict

from dataplane_core import connect
from dataplane_core.config import DataPlaneConfig
from dataplane_core.connecting import connect_backend
from dataplane_core.errors import (
    BackendError,
    ClientClosedError,
    CorruptDataError,
    UnsupportedOperationError,
)
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import Capability, WireFormat
from dataplane_noop import NoopBackend
from dataplane_testkit._columns import as_objects, batch, items_of, naming
from dataplane_testkit._hooks import Hooks
from dataplane_testkit._store import check_error

IDS = ["a", "b"]
X = batch(2, x=torch.arange(2))


@pytest.fixture
def client(faults):
    """With the samples a and b in the partition p. Both are leased."""
    with connect({"backend": "noop", "middleware": [faults], "op_timeout_s": 90.0}) as opened:
        opened.register_partition("p", ["x"], None, ["train"])
        opened.put_samples(IDS, "p", X)
        opened.held = opened.claim_meta("p", "train", ["x"], 2, lease_s=600.0)
        yield opened


#: Call -> its hook.
CALLS = {
    "register_partition": (lambda c: c.register_partition("q", ["x"], None, ["train"]), "register_partition"),
    "put_samples": (lambda c: c.put_samples(IDS, "p", {"x": torch.arange(2)}), "put_samples"),
    "put_samples of tags": (lambda c: c.put_samples(IDS, "p", tags=[{}, {}]), "put_samples"),
    "get_samples": (lambda c: c.get_samples([*IDS, *IDS], "p", ["x"]), "get_samples"),
    "claim_meta": (lambda c: c.claim_meta("p", "train", ["x"], 2, blocking=False), "claim"),
    "ack": (lambda c: c.ack(c.held), "ack"),
    "nack": (lambda c: c.nack(c.held), "nack"),
    "renew": (lambda c: c.renew(c.held, 600.0), "renew"),
    "check_consumption_status": (lambda c: c.check_consumption_status("p", ["train"]), "check_consumption"),
    "clear_samples": (lambda c: c.clear_samples(["a"], "p"), "clear_samples"),
    "list_samples": (lambda c: c.list_samples("p"), "list_samples"),
    "list_fields": (lambda c: c.list_fields(IDS, "p"), "list_fields"),
    "list_clients": (lambda c: c.list_clients(), "list_clients"),
}
each_call = pytest.mark.parametrize(("call", "hook"), CALLS.values(), ids=CALLS)
#: Hooks whose replies hold a number of rows, or one entry per row.
COUNTED = {"put_samples", "get_samples", "claim", "ack", "nack", "renew", "list_samples", "list_fields"}


@each_call
def test_a_call_is_one_call_of_its_hook(client, faults, call, hook):
    with faults.counting() as calls:
        call(client)
    assert calls == [hook]


@each_call
def test_an_error_of_the_engine_names_the_hook_and_keeps_its_cause(client, faults, call, hook):
    cause = OSError(104, "Connection reset by peer")
    with faults.error_before(hook, cause), pytest.raises(BackendError, match=f"{hook}.*Connection reset") as caught:
        call(client)
    copied = pickle.loads(pickle.dumps(caught.value)).__cause__
    assert caught.value.__cause__ is cause
    assert (type(copied), copied.args) == (type(cause), cause.args)
    call(client)


@each_call
def test_a_reply_that_is_short_or_none_is_refused(client, faults, call, hook):
    wrong = [faults.after(hook, lambda request, reply: None)]
    wrong += [faults.truncation(operation=hook)] if hook in COUNTED else []
    wrong += [faults.truncation(field="x")] if hook == "get_samples" else []
    for fault in wrong:
        if hook == "claim":
            client.nack(client.held)
        with fault, pytest.raises(BackendError):
            call(client)
        if hook in ("ack", "nack", "claim"):  # it was done
            client.reset_consumption("p", "train")
            client.held = client.claim_meta("p", "train", ["x"], 2, lease_s=600.0)


@each_call
def test_a_closed_client_refuses(client, call, hook):
    client.close()
    with pytest.raises(ClientClosedError):
        call(client)


def test_a_cell_that_is_cut_is_named(faults):
    class Carries(NoopBackend):
        """An engine of bytes."""

        wire = WireFormat(bytes=True)

        def store_write(self, write_id, columns, *rest):
            super().store_write(write_id, {name: list(map(bytes, column)) for name, column in columns.items()}, *rest)

    def cut(request, reply):
        return replace(reply, columns={name: [*column[:1], column[1][:-1]] for name, column in reply.columns.items()})

    with connect_backend(Carries, DataPlaneConfig(backend="carries", middleware=[faults]), bootstrap=True) as client:
        client.register_partition("p", ["x", "o"], None, ["train"])
        client.put_samples(IDS, "p", {"x": torch.arange(6).view(2, 3), "o": as_objects({"a": [1, 2]}, "text")})
        for field in ("x", "o"):
            with faults.after("get_samples", cut), pytest.raises(CorruptDataError, match=f"'b'.*'{field}'") as caught:
                client.get_samples(IDS, "p", [field])
            assert caught.value.cells == {"b": (field,)}
        assert items_of(client.get_samples(IDS, "p", ["o"])["o"]) == [{"a": [1, 2]}, "text"]


def test_a_put_returns_what_reads_its_samples(client, faults):
    meta = client.put_samples(IDS, "p", {"x": torch.arange(2), "y": torch.ones(2)}, tags=[{"n": 1}, {"n": 2}])
    assert (meta.partition_id, meta.sample_ids, meta.size, meta.tags) == ("p", IDS, 2, [{"n": 1}, {"n": 2}])
    assert sorted(client.get_data(meta).keys()) == sorted(meta.fields) == ["x", "y"]
    assert sorted(client.get_data(meta, ["y"]).keys()) == ["y"]
    assert client.get_data(meta.subset([1, 0, 1]))["x"].tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match="select_fields"):
        client.get_data(KVBatchMeta("p", None, ["a"]))
    with faults.counting() as calls:
        assert client.put_samples([], "p").size == 0
        assert client.get_samples([], "p", ["x"]).batch_size == (0,)
    assert calls == [], "without ids there is nothing to ask the store"


def test_none_reads_the_fields_that_all_samples_have(client):
    client.put_samples(["b"], "p", {"z": as_objects("b")})
    client.put_samples(["tagged"], "p", tags=[{"n": 1}])
    for names, fields in ((["b", "b"], ["x", "z"]), (["b", "a"], ["x"]), (["tagged", "a"], [])):
        found = client.get_samples(names, "p", None)
        assert (sorted(found.keys()), found.batch_size) == (fields, (len(names),))
    for names, where, word in ((["a", "nobody"], "p", "nobody"), (["a"], "nowhere", "nowhere")):
        with pytest.raises(KeyError, match=word):
            client.get_samples(names, where, None)


def test_enums_refuse_other_words_also_those_that_another_client_registered(client):
    def put(*items):
        client.put_samples([f"s{place}" for place in range(len(items))], "q", {"role": as_objects(*items)})

    client.register_partition("q", ["role"], None, ["train"], enums={"role": ["user", "assistant"]})
    with pytest.raises(ValueError, match=r"role.*tool"):
        put("user", "tool")
    put(None, 7, "user")
    Hooks(client).ask("register_partition", "q", fields=[], consumer_tasks=[], enums={"role": ["tool"]})
    put("tool")
    with pytest.raises(ValueError, match="'user'"):
        put("user")
    assert client.list_sample_ids("q") == ["s0"]


def test_with_open_partitions_a_put_or_a_claim_opens_them():
    with connect({"backend": "noop", "open_partitions": True}) as client:
        client.put_samples(["a"], "put", {"x": torch.tensor([1])})
        client.put_samples(["b"], "put", tags=[{"n": 1}])
        for task in ("train", "other"):
            assert client.claim_meta("put", task, ["x"], 2, blocking=False).sample_ids == ["a"]
        assert client.claim_meta("claim", "train", ["x"], 2, blocking=False).size == 0
        client.put_samples(["c"], "claim", {"x": torch.tensor([2])})
        assert client.claim_meta("claim", "train", ["x"], 2, blocking=False).sample_ids == ["c"]
        with pytest.raises(KeyError):
            client.get_samples(["a"], "nowhere", ["x"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")  # only one shows the copy
def test_cuda_tensors_are_copied_to_host(client):
    client.put_samples(IDS, "p", {"x": torch.arange(2, device="cuda")})
    assert client.get_samples(IDS, "p", ["x"])["x"].tolist() == [0, 1]


# --- arguments --------------------------------------------------------------------------------------------------------

NO_TAGS = [{"a": [1]}, {"a": torch.tensor(1)}, {"a": np.float32(1)}, {1: 1}, {"a": 2**63}, "a"]
NO_FILTERS = [["v"], *({"v": each} for each in (("~", 1), (">",), ("in", 3), (">", [1])))]
LONE = "\udc80"
NO_LISTS_OF_TAGS = [{"word": 1}, {"a": {"word": 1}}, "a", 5, iter([{}])]
#: What the message about a filter says -> the conditions of such filters.
NO_CONDITIONS = {
    "must be a value or": [([1], 2)],
    "must be a value or .* in, or 'any ' before one of them": [("any", 2)],
    "a list of primitives": [("any in", 2)],
    "does not fit in 64 bits": [("<", 2**70), ("in", [1, -(2**70)])],
    "is not valid Unicode": [LONE, ("in", ["ü", LONE])],
}
NO_NAMES = ("", "\ud800")
LEASED = KVBatchMeta("p", "train", ["a"], lease_tokens=["token"])
#: Operation -> its arguments, but for the partition.
USUAL = {
    "register_partition": {"fields": ["x"], "num_samples": None, "consumer_tasks": ["train"]},
    "put_samples": {"sample_ids": IDS, "fields": X},
    "get_samples": {"sample_ids": ["a"], "select_fields": ["x"]},
    "claim_meta": {"task_name": "train", "required_fields": ["x"], "batch_size": 1, "blocking": False},
    "list_samples": {},
    "seal": {},
}
#: Operation, error, what its message must name, and arguments that are wrong.
WRONG = [
    ("register_partition", ValueError, "", [{"partition_id": ""}, {"num_samples": 0}, {"fields": [""]}]),
    ("register_partition", ValueError, "grpo_group_size", [{"grpo_group_size": 0}]),
    ("register_partition", ValueError, "if_exists", [{"if_exists": "keeep"}]),
    ("register_partition", TypeError, "", [{"partition_id": 7}, {"consumer_tasks": "train"}]),
    ("register_partition", TypeError, r"enums\['x'\]\[0\] must be a str, got int", [{"enums": {"x": [1]}}]),
    ("register_partition", TypeError, r"enums\['x'\] must be a list, got str", [{"enums": {"x": "ab"}}]),
    ("register_partition", TypeError, "enums: a key must be a str, got int", [{"enums": {1: ["a"]}}]),
    ("register_partition", ValueError, "enums: a key must not be empty", [{"enums": {"": ["a"]}}]),
    ("register_partition", ValueError, r"enums\['x'\]\[0\] must have a length", [{"enums": {"x": ["a" * 65]}}]),
    ("seal", TypeError, r"rollouts\['a_g0'\] must be an int, got str", [{"rollouts": {"a_g0": "2"}}]),
    ("seal", TypeError, "a key must be a str, got int", [{"rollouts": {1: 1}}]),
    ("seal", TypeError, "ends_groups", [{"rollouts": {"a_g0": 1}, "ends_groups": "no"}]),
    ("seal", ValueError, r"rollouts\['a_g0'\] must be at least 1, got 0", [{"rollouts": {"a_g0": 0}}]),
    ("seal", ValueError, "'a_g0/1' is a row", [{"rollouts": {"a_g0/1": 2}}]),
    ("put_samples", ValueError, "", [{"fields": None}, {"fields": TensorDict({}, batch_size=[2])}]),
    ("put_samples", ValueError, "", [{"fields": batch(rows, x=torch.arange(rows))} for rows in (1, 3)]),
    ("put_samples", ValueError, "", [{"fields": {name: torch.zeros(2)}} for name in NO_NAMES]),
    ("put_samples", ValueError, "", [{"sample_ids": ["a", name]} for name in NO_NAMES]),
    ("put_samples", ValueError, "", [{"partition_id": name} for name in NO_NAMES]),
    ("put_samples", ValueError, "'b'", [{"sample_ids": ["b", "b"]}]),
    ("put_samples", ValueError, "align 1:1", [{"tags": [{}]}, {"tags": [{}] * 3}]),
    ("put_samples", ValueError, "'o'", [{"fields": {"o": np.array([1, 2, 3], dtype=object)}}]),
    ("put_samples", ValueError, "~", [{"fields": {name: torch.zeros(2)}} for name in ("~", "~sum")]),
    ("put_samples", TypeError, "non-tensor", [{"fields": X.clone().set("bad", X)}]),
    ("put_samples", TypeError, "non-tensor", [{"fields": X.clone().set_non_tensor("bad", "for all rows")}]),
    ("put_samples", TypeError, "meta", [{"fields": {"x": torch.zeros(2, device="meta")}}]),
    ("put_samples", TypeError, "'o'", [{"fields": {"o": as_objects(1, {"a": [{"b": (1,)}]})}}]),
    ("put_samples", TypeError, "", [{"tags": [row, row]} for row in NO_TAGS]),
    ("put_samples", TypeError, r"one dict per sample, got .* write tags=\[\{", [{"tags": t} for t in NO_LISTS_OF_TAGS]),
    (
        "put_samples",
        TypeError,
        r"weight_version'\] must be a number, got the str '10'",
        [{"tags": [{}, {"weight_version": "10"}]}],
    ),
    *(
        ("put_samples", ValueError, r"tags\[1\].*is not valid Unicode", [{"tags": [{"wörd": "ü"}, row]}])
        for row in ({"word": LONE}, {LONE: 1})
    ),
    ("get_samples", ValueError, "", [{"sample_ids": [name]} for name in NO_NAMES]),
    ("get_samples", ValueError, "select_fields", [{"select_fields": []}]),
    ("claim_meta", ValueError, "task_name", [{"task_name": name} for name in NO_NAMES]),
    ("claim_meta", ValueError, "batch_size", [{"batch_size": 0}, {"batch_size": -1}]),
    ("claim_meta", ValueError, "lease_s", [{"lease_s": 0}, {"lease_s": -1.0}]),
    ("claim_meta", ValueError, "tag_filter", [{"tag_filter": each} for each in NO_FILTERS]),
    ("list_samples", ValueError, "tag_filter", [{"tag_filter": each} for each in NO_FILTERS]),
    *(
        ("list_samples", ValueError, message, [{"tag_filter": {"x": condition}} for condition in conditions])
        for message, conditions in NO_CONDITIONS.items()
    ),
    ("claim_meta", ValueError, "sampler", [{"sampler": "random"}]),
    ("claim_meta", ValueError, "", [{"sampler": "balanced"}, {"sampler": "balanced", "dp_rank": 0}]),
    ("claim_meta", ValueError, "balance", [{"balance": cost} for cost in ({}, {"cost": "flops", "hidden_size": 8})]),
    ("claim_meta", TypeError, "balance must be a dict", [{"balance": len}]),
    ("claim_meta", ValueError, "dp_rank", [{"dp_rank": 2, "dp_size": 2}, {"dp_rank": -1}]),
    ("claim_meta", TypeError, "dp_rank", [{"dp_rank": True}]),
    ("claim_meta", ValueError, "dp_rank", [{"dp_size": 2}, {"batch_index": 0}]),
    ("claim_meta", ValueError, "batch_index", [{"dp_rank": 0, "batch_index": -1}]),
    ("renew", ValueError, "lease_s", [{"meta": LEASED, "lease_s": time_s} for time_s in (0, math.nan, math.inf)]),
    ("ack", ValueError, "token", [{"meta": KVBatchMeta("p", "train", ["a"])}]),
]


def test_wrong_arguments_are_refused_before_any_hook(client, faults):
    for operation, error, word, cases in WRONG:
        usual = {"partition_id": "p", **USUAL[operation]} if operation in USUAL else {}
        for arguments in cases:
            with naming(f"{operation} {arguments}"), faults.counting() as calls:
                with pytest.raises(error, match=word or None) as caught:
                    getattr(client, operation)(**{**usual, **arguments})
                check_error(caught.value, "noop")
                assert calls == [], "a hook was called"


def test_values_that_are_no_plain_ones_are_taken_as_such(client):
    client.register_partition("p", {"x": torch.int64}, None, ["train"], enums={"o": np.array(["a", "b"])})
    client.put_samples(["a"], "p", {"x": torch.arange(1)})
    held = client.claim_meta("p", "train", ["x"], 1, timeout_s=np.float32(9.0), lease_s=np.int64(600))
    client.renew(held, np.float64(600.0))
    info = client.describe("p").info
    assert (info.enums["o"], info.declared) == (("a", "b"), {"x": "tensor:int64:-1:"})


# --- what a backend does not declare ----------------------------------------------------------------------------------

CLAIM = ("p", "train", ["x"], 1)
#: Capability -> calls that are refused where it is not declared.
UNDECLARED = {
    Capability.CLAIMS: [
        lambda c: c.claim_meta(*CLAIM),
        lambda c: c.check_consumption_status("p", ["train"]),
        lambda c: c.is_finished("p", ["train"]),
    ],
    Capability.GROUPS: [lambda c: c.register_partition("p", ["x"], None, ["train"], 2)],
    Capability.LEASES: [
        lambda c: c.claim_meta(*CLAIM, lease_s=1.0),
        lambda c: c.ack(LEASED),
        lambda c: c.nack(LEASED),
        lambda c: c.renew(LEASED, 60.0),
    ],
    Capability.TAG_FILTERS: [
        lambda c: c.claim_meta(*CLAIM, tag_filter={"n": 1}),
        lambda c: c.list_samples("p", {"n": 1}),
    ],
    Capability.LISTING: [
        lambda c: c.list_samples("p"),
        lambda c: c.list_sample_ids("p"),
        lambda c: c.describe("p"),
        lambda c: c.list_partitions(),
        lambda c: c.ping(),
        lambda c: c.get_samples(["a"], "p", None),
    ],
    Capability.CURSORS: [lambda c: c.list_consumed("p", "train"), lambda c: c.reset_consumption("p", "train")],
    Capability.SAMPLERS: [
        lambda c: c.claim_meta(*CLAIM, dp_rank=0),
        lambda c: c.claim_meta(*CLAIM, sampler="freshest"),
    ],
    Capability.CLIENTS: [lambda c: c.list_clients()],
    Capability.UNITS: [lambda c: c.list_units()],
}


@pytest.mark.parametrize("capability", UNDECLARED)
def test_what_is_not_declared_is_refused(capability):
    lacks = type("Lacks", (NoopBackend,), {"capabilities": NoopBackend.capabilities - {capability}})
    with connect_backend(lacks, DataPlaneConfig(backend="lacks"), bootstrap=True) as client:
        client.register_partition("p", ["x"], None, ["train"])
        for call in UNDECLARED[capability]:
            with pytest.raises(UnsupportedOperationError) as caught:
                call(client)
            check_error(caught.value, "lacks")
            assert isinstance(caught.value, NotImplementedError)  # which programs may catch
