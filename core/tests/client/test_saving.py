"""What a save keeps of samples that were cleared: before it, and while it is taken."""

import pytest
import torch

from dataplane_core import connect
from dataplane_core.spec import hookimpl


class Clears:
    """Middleware that clears a sample before or after the first call of a hook."""

    def __init__(self):
        self.sample_id = self.hook = None

    def _clear(self, hook):
        if hook == self.hook:
            self.hook = None
            self.client.clear_samples([self.sample_id], "p")

    @hookimpl(wrapper=True)
    def list_samples(self, request):
        self._clear("before the list")
        reply = yield
        self._clear("after the list")
        return reply

    @hookimpl(wrapper=True)
    def export_partition(self, request):
        self._clear("before the cursors")
        reply = yield
        self._clear("after the cursors")
        return reply

    @hookimpl(wrapper=True)
    def get_samples(self, request):
        self._clear("before the rows")
        reply = yield
        self._clear("after the rows")
        return reply


@pytest.fixture
def clears():
    return Clears()


@pytest.fixture
def client(clears):
    with connect({"backend": "noop", "middleware": [clears]}) as opened:
        clears.client = opened
        yield opened


def put(client, *sample_ids):
    client.put_samples(sample_ids, "p", {"x": torch.arange(len(sample_ids))})


def test_a_group_whose_cleared_member_was_written_again_counts_for_no_further_sample(client, tmp_path):
    client.register_partition("p", ["x"], 4, ["t"], 2)
    put(client, "q0_g1", "q0_g2")
    client.clear_samples(["q0_g1"], "p")
    put(client, "q0_g1")
    client.save(tmp_path)
    client.load(tmp_path)
    put(client, "q1_g1")
    with pytest.raises(TimeoutError):  # the other member is still to come
        client.claim_meta("p", "t", ["x"], 2, timeout_s=0)
    put(client, "q1_g2")
    assert client.claim_meta("p", "t", ["x"], 2, timeout_s=0).sample_ids == ["q1_g1", "q1_g2"]


@pytest.mark.parametrize(
    "when", [f"{at} the {what}" for at in ("before", "after") for what in ("list", "cursors", "rows")]
)
@pytest.mark.parametrize("num_samples", [4, None])
def test_a_sample_that_is_cleared_during_a_save_is_saved_or_counts_as_cleared(
    client, clears, tmp_path, num_samples, when
):
    client.register_partition("p", ["x"], num_samples, ["t"], 2)
    put(client, "q0_g0", "q0_g1", "q1_g0", "q1_g1")
    clears.sample_id, clears.hook = "q0_g0", when
    client.save(tmp_path)
    assert clears.hook is None
    client.load(tmp_path)
    whole = ["q0_g0", "q0_g1"] if when == "after the rows" else []
    assert client.claim_meta("p", "t", ["x"], 4, blocking=False).sample_ids == [*whole, "q1_g0", "q1_g1"]
    if num_samples is not None:
        assert client.claim_meta("p", "t", ["x"], 2, timeout_s=0).sample_ids == []  # no more is to come
    elif not whole:
        put(client, "q0_g0")  # its group had lost it
        assert client.claim_meta("p", "t", ["x"], 2, blocking=False).sample_ids == []
