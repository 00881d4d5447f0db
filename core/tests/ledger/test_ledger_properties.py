"""Random histories against a model that is too simple to be wrong: dicts, and a scan for every question."""

import random

import msgpack
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from dataplane_core.errors import InvalidRequestError, LeaseExpiredError
from dataplane_core.ledger import Ledger, StateReader, commands, leases, to_state, views
from dataplane_core.spec import FieldSpec, new_id

FIELDS = ["x", "y"]
IDS = [f"q{q}_g{g}" for q in range(4) for g in range(3)]
SPEC = FieldSpec("tensor", "int64", 1)
#: Filters that overlap, one that nothing matches at first, one on a tag that few rows have, and one equal to another.
FILTERS = [None, {"n": (">=", 1)}, {"n": ("in", [0, 2])}, {"n": ("in", (0, 2))}, {"n": (">=", 2), "rare": ("==", "r")}]
SETTLING = [commands.Ack, commands.Nack, commands.Renew]
TAG_SETS = [{"n": 0}, {"n": 1}, {"n": 2}, {"n": 2, "rare": "r"}, {"rare": "s"}]


class LedgerMachine(RuleBasedStateMachine):
    """Model: rows in order of first write, each with its fields, version, and per task None, a lease or 'done'."""

    claims = Bundle("claims")

    @initialize(group=st.sampled_from([None, 2]), total=st.sampled_from([None, 4, 8]), self_expiring=st.booleans())
    def start(self, group, total, self_expiring):
        self.self_expiring = self_expiring
        self.made = Ledger(self_expiring=self_expiring)
        self.made.apply(commands.Register("p", FIELDS, total, ["t", "u"], group, {}, "epoch"), 0.0)
        self.group, self.total = group, total
        self.rows = {}  # id -> {"fields": set, "bytes": {field: (write, size)}}
        self.holds = {}  # (task, id) -> (token, expires_at, done)
        self.seen, self.broken_groups = set(), set()
        self.cells = {}  # (id, field) -> ref
        self.tags = {}  # id -> tags
        self.now = 0.0

    @rule(
        ids=st.lists(st.sampled_from(IDS), unique=True, min_size=1, max_size=5),
        fields=st.sets(st.sampled_from(FIELDS)),
        tag=st.sampled_from(TAG_SETS),
        tagged=st.booleans(),
    )
    def put(self, ids, fields, tag, tagged):
        specs = dict.fromkeys(sorted(fields), SPEC)
        surplus = self.total is not None and len(self.seen.union(ids)) > self.total
        if self.group:
            members = list(dict.fromkeys([*self.rows, *ids]))
            counts = {}
            for each in members:
                counts.setdefault(each.rpartition("_g")[0], []).append(each)
            new = {each.rpartition("_g")[0] for each in ids if each not in self.rows}
            surplus = surplus or any(len(counts[key]) > self.group for key in new)
        try:
            sizes = [8 if specs else 0] * len(ids)
            tags = [tag] * len(ids) if tagged or not specs else None
            write = self.made.apply(commands.BeginPut("p", ids, specs, sizes, tags, None, ttl_s=9), self.now)
        except InvalidRequestError:
            assert surplus
            return
        assert not surplus
        self.made.apply(commands.CommitPut(write), self.now)
        for pos, each in enumerate(ids):
            self.rows.setdefault(each, set()).update(fields)
            self.seen.add(each)
            self.tags.setdefault(each, {}).update({} if tags is None else tag)
            for name in fields:
                self.cells[each, name] = (write, pos)

    @rule(ids=st.lists(st.sampled_from(IDS), max_size=4))
    def clear(self, ids):
        present = {each for each in ids if each in self.rows}
        count, _ = self.made.apply(commands.Clear("p", ids), self.now)
        assert count == len(present)
        for each in present:
            del self.rows[each], self.tags[each]
            self.broken_groups.add(each.rpartition("_g")[0])
            for task in "tu":
                self.holds.pop((task, each), None)
            for name in FIELDS:
                self.cells.pop((each, name), None)

    @rule(seconds=st.sampled_from([-100.0, 0.0, 1000.0]))
    def save_and_load(self, seconds):
        """In another process, whose clock shows another time."""
        saved = [msgpack.packb(section) for section in to_state(self.made, self.now)]
        self.now += seconds
        reader = StateReader(self_expiring=self.self_expiring)
        for section in saved:
            reader.take(msgpack.unpackb(section), self.now)
        reader.check()
        self.made = reader.ledger
        self.holds = {key: (token, at + seconds, done) for key, (token, at, done) in self.holds.items()}

    def expire(self):
        if not self.self_expiring:
            due = self.made.apply(commands.Due(), self.now)
            if due is not None:
                self.made.apply(due, self.now)
            assert self.made.apply(commands.Due(), self.now) is None
        for key, (_, expires_at, done) in list(self.holds.items()):
            if not done and expires_at <= self.now:
                del self.holds[key]

    def accepts(self, members, tag_filter):
        """Whether all the members match, said without the ledger's own code."""
        tests = {">=": lambda a, b: a >= b, "in": lambda a, b: a in b, "==": lambda a, b: a == b}
        return all(
            name in self.tags[each] and tests[symbol](self.tags[each][name], operand)
            for each in members
            for name, (symbol, operand) in (tag_filter or {}).items()
        )

    def all_units(self):
        """Rows, or groups with what is there of them, in order of first write."""
        units = {}
        for each in self.rows:
            units.setdefault(each if self.group is None else each.rpartition("_g")[0], []).append(each)
        return units

    def is_whole(self, name, members):
        return self.group is None or (len(members) == self.group and name not in self.broken_groups)

    def units(self, task, required, tag_filter):
        """Claimable units in order of first write, and how many rows could still be claimed one day."""
        free = [
            members
            for name, members in self.all_units().items()
            if self.is_whole(name, members) and not any((task, each) in self.holds for each in members)
            if self.accepts(members, tag_filter)
        ]
        return [unit for unit in free if all(required <= self.rows[each] for each in unit)], sum(map(len, free))

    def would_get(self, task, required, units, all_or_nothing, tag_filter):
        """What a claim hands out, how many were ready of those asked for, and whether there can be no more."""
        size = units * (self.group or 1)
        ready, claimable = self.units(task, required, tag_filter)
        expected = [each for unit in ready[:units] for each in unit]
        all_written = self.total is not None and len(self.seen) >= self.total
        exhausted = len(expected) < size and all_written and claimable == len(expected)
        waits = all_or_nothing and len(expected) < size and not exhausted
        return [] if waits else expected, len(expected), exhausted

    def shortfall(self, task, required, tag_filter):
        """Samples leased, not matching, in groups that are not whole, and held back by a field."""
        counts = [0, 0, 0, 0]
        for name, members in self.all_units().items():
            free = [each for each in members if (task, each) not in self.holds]
            counts[0] += sum(not self.holds[task, each][2] for each in members if each not in free)
            if not self.accepts(members, tag_filter):
                counts[1] += len(free)
            elif not self.is_whole(name, members):
                counts[2] += len(free)
            elif not all(required <= self.rows[each] for each in free):
                counts[3] += len(free)
        return counts

    @rule(
        target=claims,
        task=st.sampled_from("tu"),
        required=st.sets(st.sampled_from(FIELDS), min_size=1),
        units=st.integers(1, 3),
        all_or_nothing=st.booleans(),
        lease_s=st.sampled_from([None, 2.0, 5.0]),
        tag_filter=st.sampled_from(FILTERS),
    )
    def claim(self, task, required, units, all_or_nothing, lease_s, tag_filter):
        self.expire()
        expected, num_ready, exhausted = self.would_get(task, required, units, all_or_nothing, tag_filter)
        question = ("p", task, sorted(required), units * (self.group or 1))
        asked = {"all_or_nothing": all_or_nothing, "lease_s": lease_s, "tag_filter": tag_filter}
        claim = commands.ClaimSamples(*question, **asked, token=new_id(), holder="h", explain=True)
        # leases that are over and that the ledger has not ended are a change too
        assert self.made.apply(commands.MayClaim(claim), self.now) or not expected
        got = self.made.apply(claim, self.now)
        assert list(got.sample_ids) == expected
        assert (got.exhausted, got.num_ready) == (exhausted, num_ready)
        assert [dict(each) for each in got.tags] == [self.tags[each] for each in expected]
        if not expected:
            told = got.shortfall
            counts = [told.num_leased, told.num_not_matching, told.num_incomplete, told.num_lacking]
            assert counts == self.shortfall(task, required, tag_filter)
        for index, each in enumerate(expected):
            token = "" if lease_s is None else got.lease_tokens[index]
            self.holds[task, each] = (token, self.now + (lease_s or 0), lease_s is None)
        if units > 1:  # a question brings a view up to date, which must not be needed
            again, _, _ = self.would_get(task, required, units, all_or_nothing, tag_filter)
            assert self.made.apply(commands.MayClaim(claim), self.now) == bool(again)
        return (task, expected, list(got.lease_tokens or []))

    @rule(claim=claims, action=st.sampled_from(SETTLING))
    def settle(self, claim, action):
        task, ids, tokens = claim
        if not tokens:
            return
        self.expire()
        valid = []
        for each, token in zip(ids, tokens, strict=True):
            hold = self.holds.get((task, each))
            valid.append(hold is not None and hold[0] == token and (not hold[2] or action is commands.Ack))
        arguments = ("p", task, ids, tokens) + ((3.0,) if action is commands.Renew else ())
        try:
            self.made.apply(action(*arguments), self.now)
        except LeaseExpiredError as error:
            lost = list(error.sample_ids)
        else:
            lost = []
        assert lost == [each for each, good in zip(ids, valid, strict=True) if not good]
        if lost:
            return
        for each, token in zip(ids, tokens, strict=True):
            if action is commands.Nack:
                del self.holds[task, each]
            elif action is commands.Ack:
                self.holds[task, each] = (token, self.now, True)
            elif not self.holds[task, each][2]:
                self.holds[task, each] = (token, self.now + 3.0, False)

    @rule(seconds=st.sampled_from([0.5, 2.0, 10.0]))
    def wait(self, seconds):
        self.now += seconds

    @invariant()
    @precondition(lambda self: hasattr(self, "made"))
    def agrees(self):
        assert self.made.apply(commands.ListSamples("p", None), self.now).sample_ids == list(self.rows)
        live = set(self.cells.values())
        assert self.made.held_bytes == self.made._partitions["p"].held_bytes == 8 * len(live)
        for each, fields in self.rows.items():
            if fields:
                names = sorted(fields)
                located = self.made.apply(commands.Locate("p", [each], names), self.now)
                found = {name: (part.write_id, part.positions[0]) for part in located.parts for name in part.fields}
                assert found == {name: self.cells[each, name] for name in names}
        self.expire()
        for task in "tu":
            done = [self.holds.get((task, each), ("", 0, False))[2] for each in self.rows]
            all_there = bool(done) if self.total is None else len(self.seen) == self.total
            assert self.made.apply(commands.Consumed("p", [task]), self.now) == (all_there and all(done))


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)


@pytest.mark.parametrize("slack", [0, 2000], ids=["rebuilt all the time", "never rebuilt"])
@pytest.mark.parametrize("seed", range(12))
def test_long_histories_agree_with_the_model(seed, slack, monkeypatch):
    """Longer histories than Hypothesis makes, with rows that stay; what is kept is rebuilt all the time, or never."""
    monkeypatch.setattr(views, "_SLACK", slack)
    monkeypatch.setattr(leases, "_SLACK", slack)
    monkeypatch.setattr(views, "_MOST_FILTERS", 2 + slack)
    draw = random.Random(seed)
    machine = LedgerMachine()
    shape = {"group": draw.choice([None, 2]), "total": draw.choice([None, 4, 8, 12]), "self_expiring": seed % 2 == 0}
    machine.start(**shape)
    claims = []
    for _ in range(500):
        step = draw.random()
        fields = set(draw.sample(FIELDS, draw.randint(1, 2)))
        if step < 0.3:
            ids = draw.sample(IDS, draw.randint(1, 4))
            fields = fields if draw.random() < 0.6 else set()
            machine.put(ids=ids, fields=fields, tag=draw.choice(TAG_SETS), tagged=draw.random() < 0.7)
        elif step < 0.35:
            machine.clear(ids=draw.sample(IDS, 1))
        elif step < 0.7:
            claims.append(
                machine.claim(
                    task=draw.choice("tu"),
                    required=fields,
                    units=draw.randint(1, 3),
                    all_or_nothing=draw.random() < 0.5,
                    lease_s=draw.choice([2.0, 5.0, 5.0, 9.0] + [None] * (draw.random() < 0.1)),
                    tag_filter=draw.choice(FILTERS),
                )
            )
        elif step < 0.85 and claims:
            ack, nack, renew = SETTLING
            machine.settle(claim=draw.choice(claims[-4:]), action=draw.choice([ack, nack, nack, renew, renew]))
        else:
            machine.wait(seconds=draw.choice([0.5, 0.5, 2.0]))
        machine.agrees()
        if draw.random() < 0.01:
            machine.start(**shape)
            claims = []
        elif draw.random() < 0.01:
            machine.save_and_load(seconds=draw.choice([-100.0, 1000.0]))
