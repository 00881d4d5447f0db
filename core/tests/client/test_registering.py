"""A partition that another client registers again: who is told what went, and by whom."""

import logging
import re

import pytest
import torch

from dataplane_core import connect
from dataplane_core.errors import LeaseExpiredError, MissingDataError
from dataplane_core.spec import new_id, this_process


@pytest.fixture
def two():
    """Two clients of one store, of the roles driver and rank."""
    options = {"capacity_bytes": "1 MiB", "namespace": f"test-{new_id()}"}
    config = {"backend": "shm_store", "options": options, "announce_s": None}
    with (
        connect({**config, "role": "driver"}) as driver,
        connect({**config, "role": "rank"}, bootstrap=False) as rank,
    ):
        register(driver)
        driver.put_samples(["a", "b"], "p", {"x": torch.arange(2)})
        yield driver, rank


def register(client, **more):
    client.register_partition("p", ["x"], 4, ["train"], **more)


def test_the_log_says_what_a_second_registration_drops(two, caplog):
    driver, rank = two
    driver.claim_meta("p", "train", ["x"], 1)
    register(rank)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    told = "register_partition('p') dropped 2 samples, 1 of them not consumed by 'train': "
    assert record.message.startswith(f"{told}{this_process()} (driver) had registered it ")
    register(rank)  # its own, and empty
    register(driver)  # empty
    driver.put_samples(["a"], "p", {"x": torch.arange(1)})
    register(driver)  # its own
    register(rank, if_exists="keep")
    assert len(caplog.records) == 1


def test_errors_name_who_registered_a_partition_again(two):
    driver, rank = two
    held = driver.claim_meta("p", "train", ["x"], 1, lease_s=60.0)
    read = rank.claim_meta("p", "train", ["x"], 1, lease_s=60.0)
    told = r"\(rank\) registered the partition \d+ s ago\.$"
    register(rank)
    for fails, error in ((driver.ack, LeaseExpiredError), (driver.get_data, MissingDataError)):
        with pytest.raises(error) as caught:
            fails(held)
        assert re.search(told, caught.value.hint)
    with pytest.raises(LeaseExpiredError) as caught:
        rank.ack(read)
    assert "registered" not in caught.value.hint, "it knows what it did itself"
    info = rank.describe("p").info
    assert info.registered_by == f"{this_process()} (rank)"
    register(driver, if_exists="keep")
    assert driver.describe("p").info == info


def test_a_client_is_told_of_a_registration_since_it_was_opened(two):
    _, rank = two
    with pytest.raises(MissingDataError) as caught:
        rank.get_samples(["z"], "p", ["x"])
    told = f"It was never written, or cleared. {this_process()} (driver) registered the partition "
    assert re.fullmatch(rf"{re.escape(told)}\d+ s ago\.", caught.value.hint), "it may have held nothing before"
    with pytest.raises(MissingDataError) as caught:
        rank.get_samples(["a"], "p", ["y"])
    assert "registered" not in caught.value.hint, "the sample is there"
