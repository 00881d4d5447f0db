"""Ctrl-C at any moment of an operation leaves a client that can be used."""

import threading

from dataplane_core import connect


def test_an_interrupt_while_a_lock_is_taken_does_not_block_the_next_operation(interrupted):
    """`threading.Condition` takes its lock in Python code, which an interrupt can leave with the lock held."""
    client = connect({"backend": "noop", "op_timeout_s": 2.0})
    errors = []  # with the frames of all calls

    def operate():
        client.check_consumption_status("train", ["trainer"])

    while (error := interrupted(operate, len(errors), threading)) is not None:
        errors.append(error)
        following = threading.Thread(target=operate, daemon=True)
        following.start()
        following.join(30)
        assert not following.is_alive(), f"the operation after the interrupt before instruction {len(errors) - 1} hangs"
    client.close()
    assert errors
