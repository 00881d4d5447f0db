"""The adapter for NeMo RL, over a small stand-in for its interface.

`scripts/checkouts/test_trainer_checkouts.py` runs NeMo RL's own tests, where a checkout of it is given.
"""

import inspect
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tensordict import NonTensorStack, TensorDict

from dataplane_compat.nemo_rl import NemoRLAdapter, Section, activate, client_class
from dataplane_core.config import load_config
from dataplane_core.connecting import load_backend
from dataplane_core.errors import ConfigError

STAND_IN = Path(__file__).parent / "nemo_rl_stand_in"

#: What every version of NeMo RL's interface has.
OF_ALL_VERSIONS = {
    "register_partition": ("(partition_id, fields, num_samples, consumer_tasks, grpo_group_size=None, enums=None)"),
    "claim_meta": (
        "(partition_id, task_name, required_fields, batch_size, dp_rank=None, blocking=True, timeout_s=60.0)"
    ),
    "get_data": "(meta, select_fields=None)",
    "check_consumption_status": "(partition_id, task_names)",
    "put_samples": "(sample_ids, partition_id, fields=None, tags=None)",
    "get_samples": "(sample_ids, partition_id, select_fields)",
    "clear_samples": "(sample_ids, partition_id)",
    "close": "()",
}
#: What version 0.8.0 has besides, and main at 7ea279ab lacks.
OF_0_8_0 = {
    "list_sample_ids": "(partition_id)",
    "save_checkpoint": "(checkpoint_dir, *, metadata=None)",
    "load_checkpoint": "(checkpoint_dir)",
}


def signature_of(function):
    """Names, kinds and defaults, without self and annotations."""
    signature = inspect.signature(function)
    empty = inspect.Parameter.empty
    parameters = [each.replace(annotation=empty) for each in signature.parameters.values() if each.name != "self"]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


@pytest.fixture
def nemo_rl(monkeypatch):
    """The stand-in, importable and not yet activated."""

    def forget():
        for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_rl"]:
            del sys.modules[name]
        client_class.cache_clear()

    forget()
    monkeypatch.syspath_prepend(str(STAND_IN))
    import nemo_rl.trainer

    yield nemo_rl
    forget()


@pytest.fixture
def client(nemo_rl):
    client = client_class()({"dataplane": {"backend": "noop"}})
    yield client
    client.close()


def columns(count, start=0):
    return TensorDict({"x": torch.arange(start, start + count)}, batch_size=[count])


def register(client, tasks=("train",), **more):
    client.register_partition("train", fields=["x"], num_samples=2, consumer_tasks=list(tasks), **more)


# --- the interface ----------------------------------------------------------------------------------------------------


def test_the_adapter_has_the_signatures_of_both_versions():
    said = OF_ALL_VERSIONS | OF_0_8_0
    assert {name: signature_of(getattr(NemoRLAdapter, name)) for name in said} == said


def test_the_client_and_its_metas_are_of_nemo_rls_types(client, nemo_rl):
    theirs = nemo_rl.data_plane.interfaces
    assert isinstance(client, theirs.DataPlaneClient)
    register(client)
    written = client.put_samples(["a", "b"], "train", columns(2), tags=[{"std": 0.5}, {"std": torch.tensor(1.5)}])
    assert written == theirs.KVBatchMeta("train", None, ["a", "b"], ["x"], tags=[{"std": 0.5}, {"std": 1.5}])
    claimed = client.claim_meta("train", "train", ["x"], 2)
    assert claimed == theirs.KVBatchMeta("train", "train", ["a", "b"], ["x"], tags=[{"std": 0.5}, {"std": 1.5}])
    assert client.get_data(claimed)["x"].tolist() == [0, 1]
    assert client.check_consumption_status("train", ["train"])


def test_reads_name_their_fields_and_miss_nothing_silently_and_objects_and_ragged_rows_come_back(client, nemo_rl):
    register(client)
    assert client.put_samples(["made"], "train").tags is None, "a put of neither fields nor tags makes the samples"
    assert client.put_samples([], "train").sample_ids == []
    assert client.list_sample_ids("train") == ["made"]
    ragged = torch.nested.nested_tensor([torch.arange(3), torch.arange(1)], layout=torch.jagged)
    logs = NonTensorStack({"role": "user"}, {"role": "assistant"})
    client.put_samples(["a", "b"], "train", TensorDict({"ids": ragged, "log": logs}, batch_size=[2]))
    read = client.get_samples(["b", "a"], "train", ["ids", "log"])
    assert [row.tolist() for row in read["ids"].unbind()] == [[0], [0, 1, 2]]
    assert read.get("log").tolist() == [{"role": "assistant"}, {"role": "user"}]
    meta = nemo_rl.data_plane.interfaces.KVBatchMeta("train", None, ["a"])
    with pytest.raises(ValueError, match="select_fields"):
        client.get_data(meta)
    assert client.get_data(meta, ["ids"])["ids"].tolist() == [[0, 1, 2]]
    with pytest.raises(KeyError, match="gone"):
        client.get_samples(["a", "gone"], "train", ["ids"])
    assert client.get_samples([], "train", ["ids"]).batch_size == (0,)


# --- partitions -------------------------------------------------------------------------------------------------------


def test_registering_again_keeps_rows_whatever_the_sizes(client):
    register(client, grpo_group_size=2)
    client.put_samples(["a", "b"], "train", columns(2))
    register(client, tasks=["other"], grpo_group_size=3)
    client.put_samples(["c", "d", "e"], "train", columns(3, 2))  # more than num_samples
    assert client.claim_meta("train", "train", ["x"], 5).sample_ids == list("abcde")
    assert client.claim_meta("train", "other", ["x"], 5).sample_ids == list("abcde")


def test_a_partition_need_not_be_registered(client):
    assert client.list_sample_ids("rollout_data") == []
    client.clear_samples(["a"], "rollout_data")
    client.put_samples(["a", "b"], "rollout_data", columns(2))
    assert client.claim_meta("rollout_data", "any", ["x"], 2).sample_ids == ["a", "b"]
    assert client.claim_meta("not yet there", "any", ["x"], 2, blocking=False).sample_ids == []


def test_clearing_a_partition_keeps_it_usable_and_clearing_what_is_empty_or_unknown_warns(client):
    register(client)
    client.put_samples(["a", "b"], "train", columns(2))
    client.clear_samples(None, "train")
    assert client.list_sample_ids("train") == []
    for name in ("train", "unknown"):
        with pytest.warns(RuntimeWarning, match="holds no samples"):
            client.clear_samples(None, name)
    client.put_samples(["a"], "train", columns(1))
    assert client.claim_meta("train", "train", ["x"], 1).sample_ids == ["a"]


# --- claims -----------------------------------------------------------------------------------------------------------


def test_a_blocking_claim_waits_for_a_full_batch_and_another_takes_what_is_ready(client):
    register(client)
    with pytest.raises(KeyError, match="no consumer task 'trian'"):
        client.claim_meta("train", "trian", ["x"], 1)
    client.put_samples(["a", "b", "c"], "train", columns(3), tags=[{}, {"input_lengths": 7}, {}])
    for timeout_s in (0.1, -1):
        with pytest.raises(TimeoutError):
            client.claim_meta("train", "train", ["x"], 4, timeout_s=timeout_s)
    first = client.claim_meta("train", "train", ["x"], 1, dp_rank=0)
    rest = client.claim_meta("train", "train", ["x"], 4, dp_rank=0, blocking=False)  # the same rank gets none twice
    assert (first.sample_ids, first.sequence_lengths) == (["a"], None)
    assert (rest.sample_ids, rest.sequence_lengths) == (["b", "c"], [7, 0])


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_restores_rows_cursors_and_metadata(client, tmp_path):
    register(client)
    client.put_samples(["a", "b"], "train", columns(2))
    client.claim_meta("train", "train", ["x"], 1)
    client.save_checkpoint(str(tmp_path / "step_3"), metadata={"step": 3})
    client.clear_samples(["a", "b"], "train")
    assert client.load_checkpoint(str(tmp_path / "step_3")) == {"step": 3}
    assert client.list_sample_ids("train") == ["a", "b"]
    assert client.claim_meta("train", "train", ["x"], 1).sample_ids == ["b"]


# --- activation -------------------------------------------------------------------------------------------------------

SECTION = {"enabled": True, "impl": "dataplane", "dataplane": {"backend": "noop"}, "storage_capacity": 4}
THEIRS = {"enabled": True, "impl": "transfer_queue", "storage_capacity": 4}


def test_the_config_chooses_the_adapter_wherever_the_factory_was_imported(nemo_rl):
    activate()
    activate()
    for build in (nemo_rl.data_plane.factory.build_data_plane_client, nemo_rl.trainer.build_data_plane_client):
        client = build(SECTION, bootstrap=True)
        assert isinstance(client, NemoRLAdapter)
        client.close()
        client.close()
        assert build(THEIRS, bootstrap=False)[1:] == (THEIRS, False)
        for refused in (None, {**SECTION, "enabled": False}, {**SECTION, "impl": "noop"}):
            with pytest.raises(ValueError, match=r"disabled|unknown"):
                build(refused)


def test_the_trainers_config_takes_the_section_and_makes_it_one_that_activates(nemo_rl):
    with pytest.raises(ValueError, match="transfer_queue"):
        nemo_rl.trainer.MasterConfig(data_plane=SECTION)
    activate()
    section = nemo_rl.trainer.MasterConfig(data_plane=SECTION).data_plane
    assert type(section) is Section
    assert section == SECTION
    assert type(nemo_rl.trainer.MasterConfig(data_plane=THEIRS).data_plane) is dict
    with pytest.raises(ValueError, match="transfer_queue"):
        nemo_rl.trainer.MasterConfig(data_plane={**SECTION, "impl": "noop"})


def test_a_section_that_is_unpickled_activates(nemo_rl):
    section = pickle.loads(pickle.dumps(Section(SECTION)))
    client = nemo_rl.trainer.build_data_plane_client(section)
    assert isinstance(client, NemoRLAdapter)
    client.close()


def test_observability_wraps_the_adapter(nemo_rl):
    activate()
    events = []
    build = nemo_rl.trainer.build_data_plane_client
    client = build({**SECTION, "observability": {"enabled": True, "callback": events.append}})
    client.list_sample_ids("train")
    client.close()
    assert events == ["list_sample_ids", "close"]
    unwrapped = build({**SECTION, "observability": {"enabled": False}})
    assert isinstance(unwrapped, NemoRLAdapter)
    unwrapped.close()


def test_the_section_that_the_docs_show_is_one():
    text = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```yaml\n(data_plane:.*?)```", text, re.DOTALL)
    section = yaml.safe_load(shown)["data_plane"]
    assert (section["enabled"], section["impl"]) == (True, "dataplane")
    config = load_config(section["dataplane"])
    assert load_backend(config.backend).Config.model_validate(config.options).namespace == "run7"


def test_a_section_without_a_config_says_what_is_missing(nemo_rl):
    with pytest.raises(ConfigError, match=r"data_plane\.dataplane is missing"):
        client_class()({"enabled": True, "impl": "dataplane"})
