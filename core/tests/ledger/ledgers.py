"""Ledgers with a partition ``p``, and commands of its clients, with what tests rarely say of them."""

from dataplane_core.ledger import Ledger, commands
from dataplane_core.spec import FieldSpec, new_id

INT = FieldSpec("tensor", "int64", 1)


def register(num_samples=None, group=None, tasks=("t",), epoch="e"):
    return commands.RegisterRequest("p", ["x"], num_samples, list(tasks), group, {}, epoch)


def ledger(num_samples=None, group=None, tasks=("t",), **options):
    made = Ledger(**options)
    made.apply(register(num_samples, group, tasks), 0.0)
    return made


def begin(ids, fields=("x",), size=8, ttl_s=10.0, **more):
    """The begin of a put of cells of this size, in one write."""
    write = commands.Write(list(fields), [size] * len(ids))
    return commands.BeginPut("p", list(ids), dict.fromkeys(fields, INT), [write], ttl_s=ttl_s, **more)


def put(made, ids, fields=("x",), now=0.0, **more):
    """Returns the id of the write, and what its commit replied."""
    write_id = made.apply(begin(ids, fields, **more), now)
    return write_id, made.apply(commands.CommitPut(write_id), now)


def claim(count=1, fields=("x",), task="t", **options):
    options = {"all_or_nothing": True, "lease_s": None, "token": new_id(), **options}
    return commands.ClaimRequest("p", task, list(fields), count, **options)
