"""Random histories of rollouts with kills, checked by a model that knows nothing of the ledger's.

Writers put rollouts row by row and die in the middle, trainers die with their leases, replies are lost, the host is
killed and goes on from its state. Then no group is lost, none is given twice, and none in part.
"""

import contextlib
import itertools
import random

import pytest
from ledgers import begin, claim, register, saved_and_loaded
from msgspec.structs import replace

from dataplane_core.errors import AlreadyDoneError, DataPlaneError, InvalidRequestError
from dataplane_core.ledger import Ledger, commands, group_of, rollout_of
from dataplane_testkit._profiles import by_profile

ROWS, ROLLOUTS = "rollout_rows", "group_rollouts"


class Model:
    """What was written, and what of it tasks may be given."""

    def __init__(self, most):
        self.most = most
        self.rows = {}  # id -> fields, tags
        self.broken = set()

    def rollouts(self, group):
        found = {}
        for sample_id in self.rows:
            if group_of(sample_id) == group:
                found.setdefault(rollout_of(sample_id), []).append(sample_id)
        return found

    def said(self, ids, tag):
        return {self.rows[each][1][tag] for each in ids if tag in self.rows[each][1]}

    def whole(self, group):
        """The rows of the whole rollouts of a group."""
        parts = self.rollouts(group).values()
        return {each for ids in parts if self.said(ids, ROWS) == {len(ids)} for each in ids}

    def is_whole(self, group):
        number = self.said([each for each in self.rows if group_of(each) == group], ROLLOUTS) or {self.most}
        return group not in self.broken and {len(set(map(rollout_of, self.whole(group))))} == number

    def fits(self, group):
        """Whether no rule is broken. Of a group that is never given, anything goes."""
        if group in self.broken:
            return True
        for ids in self.rollouts(group).values():
            sealed = self.said(ids, ROWS)
            if len(sealed) > 1 or any(int(each.rpartition("/")[2]) >= min(sealed, default=99) for each in ids):
                return False
        numbers = self.said([each for each in self.rows if group_of(each) == group], ROLLOUTS)
        most = min([*numbers, self.most or 99])
        num_whole = len(set(map(rollout_of, self.whole(group))))
        return len(numbers) < 2 and max([num_whole, *numbers]) <= most

    def put(self, ids, fields, tags):
        """Puts, if that breaks no rule. Returns whether it does not."""
        before, good = dict(self.rows), True
        for each, tag in zip(ids, tags, strict=True):
            had = self.rows.get(each, (frozenset(), {}))
            good &= group_of(each) in self.broken or all(
                had[1].get(name, tag.get(name)) == tag.get(name, had[1].get(name)) for name in (ROWS, ROLLOUTS)
            )
            self.rows[each] = had[0] | fields, {**had[1], **tag}
        good &= all(map(self.fits, set(map(group_of, ids))))
        self.rows = self.rows if good else before
        return good

    def clear(self, ids):
        for each in ids:
            if each in self.whole(group_of(each)):
                self.broken.add(group_of(each))
            self.rows.pop(each, None)


class Run:
    """Processes that write, seal, train and die, on one ledger."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        most = self.dice.choice([None, 2, 3])
        self.ledger, self.model, self.now = Ledger(), Model(most), 0.0
        self.ledger.apply(replace(register(group=most, tasks=("t", "u")), rollouts=True), 0.0)
        self.writers = {}  # rollout -> its next row, the number of its rows
        self.held = {}  # task, id -> token, when the lease ends; infinite: consumed
        self.leases = []  # claims with their tokens
        self.num_given = 0
        self.numbers = itertools.count(1)

    def apply(self, command):
        """A call. Now and then its reply is lost, and it comes again; or the host is killed before that."""
        reply = self.ledger.apply(command, self.now)
        while self.dice.random() < 0.05:
            if self.dice.random() < 0.2:
                self.ledger = saved_and_loaded(self.ledger)
            with contextlib.suppress(AlreadyDoneError):
                reply = self.ledger.apply(command, self.now)
        return reply

    def put(self, ids, fields, tags):
        """Puts in two steps. Now and then the writer dies between them, and nothing is written. Returns whether."""
        number = next(self.numbers)
        command = begin(ids, fields, tags=tags, write_id=100 * number, request_id=f"r{number}")
        if not fields:
            command = commands.PutTags("p", ids, tags, request_id=f"r{number}")
        if fields and self.dice.random() < 0.05:
            with contextlib.suppress(InvalidRequestError):
                self.apply(command)
            return False
        good = self.model.put(ids, frozenset(fields), tags)
        with contextlib.nullcontext() if good else pytest.raises(InvalidRequestError):
            write_id = self.apply(command)
            if fields:
                self.apply(commands.CommitPut(write_id))
        return good

    # --- what processes do --------------------------------------------------------------------------------------------

    def write(self):
        """A writer goes on with its rollout, or begins one, by some rows. One of the last has the seal."""
        dice = self.dice
        rollout = f"q{dice.randrange(4)}_g{dice.randrange(4)}"
        row, num_rows = self.writers.setdefault(rollout, (0, dice.randint(1, 3)))
        last = min(num_rows, row + dice.randint(1, 3)) + (dice.random() < 0.05)
        ids = [f"{rollout}/{number}" for number in range(row, last)] or [f"{rollout}/{num_rows}"]
        tags = [{"input_lengths": dice.randint(1, 9)} for _ in ids]
        if dice.random() < (0.8 if last >= num_rows else 0.1):
            tags[dice.randrange(len(ids))][ROWS] = num_rows
        if dice.random() < 0.05:
            tags[0][ROLLOUTS] = dice.choice([1, 2, 2, 3])
        fields = dice.choice([["x"], ["x"], ["x"], ["x", "y"]])
        if self.put(ids, fields, tags):
            self.writers[rollout] = min(last, num_rows), num_rows

    def retry(self):
        """A writer died. Another one begins its rollout anew, and clears its rows, or does not."""
        rollout = self.dice.choice([*self.writers, "q0_g0"])
        if self.dice.random() < 0.8:
            self.clear([each for each in self.model.rows if rollout_of(each) == rollout])
        self.writers.pop(rollout, None)

    def seal(self):
        """A driver seals what is there: a rollout, or with the group what is left of it."""
        group = f"q{self.dice.randrange(4)}"
        sizes = {name: len(ids) for name, ids in self.model.rollouts(group).items()}
        some = self.dice.sample(sorted(sizes), self.dice.randint(1, len(sizes))) if sizes else []
        ends = {ROLLOUTS: len(some)} if self.dice.random() < 0.4 else {}
        if some:
            self.put([f"{name}/{sizes[name] - 1}" for name in some], [], [{ROWS: sizes[name], **ends} for name in some])

    def score(self):
        rows = sorted(self.model.rows)
        if rows:
            ids = [each for each in rows if group_of(each) == group_of(self.dice.choice(rows))] or rows[:1]
            self.put(ids, ["y"], [{} for _ in ids])

    def take(self):
        """A trainer claims."""
        dice, task = self.dice, self.dice.choice("tu")
        limits = {name: dice.randint(1, 12) for name in ("max_rows", "max_tokens") if dice.random() < 0.2}
        about = {"all_or_nothing": dice.random() < 0.3, "lease_s": dice.choice([None, 2.0, 9.0]), "left_s": 1e9}
        fields = dice.choice([["x"], ["x"], ["x", "y"], []])
        self.given(claim(dice.randint(1, 3), fields, task, token=f"k{dice.getrandbits(60)}", **about, **limits))

    def given(self, command):
        """Claims, and compares what it gives with the model."""
        reply = self.apply(command)
        rows, task = self.model.rows, command.task_name
        groups = list(dict.fromkeys(map(group_of, reply.sample_ids)))
        wanted = [each for group in groups for each in self.model.whole(group)]
        assert sorted(reply.sample_ids) == sorted(wanted), "a part of a group, or a row twice"
        assert all(map(self.model.is_whole, groups)), "a group that is not whole"
        first = list(dict.fromkeys(group_of(each) for each in rows if group_of(each) in groups))
        assert groups == first, "not in order of first write"
        names = [rollout_of(each) for each in reply.sample_ids]
        assert sum(a != b for a, b in zip(names, [None, *names], strict=False)) == len(set(names)), "apart"
        for each in reply.sample_ids:
            assert rows[each][0] >= set(command.required_fields), "fields that are not there"
            assert self.held.get((task, each), ("", -1.0))[1] <= self.now, "a row that is held"
            ends_at = float("inf") if command.lease_s is None else self.now + command.lease_s
            self.held[task, each] = command.token, ends_at
        tokens = sum(rows[each][1].get("input_lengths", 0) for each in reply.sample_ids)
        if len(groups) > 1:
            assert len(names) <= (command.max_rows or 99)
            assert tokens <= (command.max_tokens or 999)
        assert len(groups) <= command.batch_size
        if command.lease_s is not None and groups:
            self.leases.append((command, list(reply.sample_ids)))
        self.num_given += len(groups)
        return groups

    def settle(self):
        """A trainer acks, gives back or renews; or it has died, and its lease ends some time."""
        if not self.leases:
            return
        held, ids = self.leases.pop(self.dice.randrange(len(self.leases)))
        kind = self.dice.choice([commands.AckRequest, commands.NackRequest, commands.RenewRequest, None])
        if kind is None:
            return
        extra = [9.0] if kind is commands.RenewRequest else []
        settle = kind("p", held.task_name, ids, [held.token] * len(ids), *extra, left_s=1e9)
        mine = [self.held.get((held.task_name, each)) for each in ids]
        is_held = all(one is not None and one[0] == held.token and one[1] > self.now for one in mine)
        try:
            self.apply(settle)
            assert is_held
        except DataPlaneError:
            assert not is_held
            return
        ends_at = {"ack": float("inf"), "nack": -1.0, "renew": self.now + 9.0}[settle.op]
        self.held.update({(held.task_name, each): (held.token, ends_at) for each in ids})
        if settle.op == "renew":
            self.leases.append((held, ids))
        if settle.op == "ack" and self.dice.random() < 0.5:
            self.clear(ids)

    def clear(self, ids=()):
        ids = ids or self.dice.sample(sorted(self.model.rows), min(len(self.model.rows), self.dice.randint(0, 2)))
        self.apply(commands.ClearRequest("p", list(ids), left_s=1e9))
        self.model.clear(ids)
        self.held = {key: hold for key, hold in self.held.items() if key[1] not in ids}

    def kill_host(self):
        self.ledger = saved_and_loaded(self.ledger)

    def wait(self):
        self.now += self.dice.choice([0.5, 1.0, 5.0])

    def load(self):
        """Another store gets the rows, in order of first write, with their tags of now. Leases end."""
        listed = self.ledger.apply(commands.ListRequest("p"), self.now)
        other = Ledger()
        state = self.ledger.apply(commands.ExportRequest("p"), self.now)
        about = {"cleared_ids": list(state.cleared_ids), "broken_groups": list(state.broken_groups)}
        other.apply(replace(register(group=self.model.most, tasks=("t", "u")), rollouts=True, **about), self.now)
        for each, tags in zip(listed.sample_ids, listed.tags, strict=True):
            other.apply(commands.PutTags("p", [each], [tags]), self.now)
            if fields := sorted(self.model.rows[each][0]):
                other.apply(commands.CommitPut(other.apply(begin([each], fields), self.now)), self.now)
        for task, ids in state.consumed.items():
            other.apply(commands.SetCursorRequest("p", task, list(ids)), self.now)
        self.ledger, self.leases = other, []
        self.held = {key: hold for key, hold in self.held.items() if hold[1] == float("inf")}

    def history(self, num_steps):
        steps = {self.write: 12, self.seal: 2, self.score: 2, self.take: 6, self.settle: 3, self.retry: 1.5}
        steps |= {self.clear: 0.3, self.kill_host: 0.2, self.wait: 2, self.load: 0.1}
        for step in self.dice.choices(list(steps), list(steps.values()), k=num_steps):
            step()

    def audit(self):
        """Each whole group that a task has not consumed is given to it, once."""
        self.now += 100.0
        for task in "tu":
            left = {group for group in set(map(group_of, self.model.rows)) if self.model.is_whole(group)}
            left = {group for group in left if not self.consumed(task, group)}
            while groups := self.given(claim(2, (), task, all_or_nothing=False)):
                assert left >= set(groups)
                left -= set(groups)
            assert not left, f"lost: {left}"

    def consumed(self, task, group):
        """Whether a task has consumed a row of a group."""
        return any(self.held.get((task, each), ("", 0.0))[1] == float("inf") for each in self.model.whole(group))


@pytest.mark.timeout(by_profile(600, 600, 7200))
def test_no_group_is_lost_given_twice_or_in_part():
    num_given = 0
    for seed in range(by_profile(40, 200, 20_000)):
        run = Run(seed)
        try:
            run.history(120)
            run.audit()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        num_given += run.num_given
    print(f"{seed + 1} histories, {num_given} groups given")
    assert num_given > 2 * (seed + 1)
