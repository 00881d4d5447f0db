"""Random histories against a model that is too simple to be wrong: dicts, and a scan for every question."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from dataplane_core.errors import InvalidRequestError, LeaseExpiredError
from dataplane_core.fields import FieldSpec
from dataplane_core.ledger import Ledger

FIELDS = ["x", "y"]
IDS = [f"q{q}_g{g}" for q in range(4) for g in range(3)]
SPEC = FieldSpec("tensor", "int64", 1)


class LedgerMachine(RuleBasedStateMachine):
    """Model: rows in order of first write, each with its fields, version, and per task None, a lease or 'done'."""

    claims = Bundle("claims")

    @initialize(group=st.sampled_from([None, 2]), total=st.sampled_from([None, 4, 8]))
    def start(self, group, total):
        self.made = Ledger()
        self.made.register("p", FIELDS, total, ["t", "u"], group, {})
        self.group, self.total = group, total
        self.rows = {}  # id -> {"fields": set, "bytes": {field: (write, size)}}
        self.holds = {}  # (task, id) -> (token, expires_at, done)
        self.seen, self.poisoned = set(), set()
        self.cells = {}  # (id, field) -> ref
        self.now = 0.0

    @rule(
        ids=st.lists(st.sampled_from(IDS), unique=True, min_size=1, max_size=5), fields=st.sets(st.sampled_from(FIELDS))
    )
    def put(self, ids, fields):
        specs = dict.fromkeys(sorted(fields), SPEC)
        surplus = False
        if self.group:
            members = list(dict.fromkeys([*self.rows, *ids]))
            counts = {}
            for each in members:
                counts.setdefault(each.rpartition("_g")[0], []).append(each)
            new = {each.rpartition("_g")[0] for each in ids if each not in self.rows}
            surplus = any(len(counts[key]) > self.group for key in new)
        try:
            sizes = [8 if specs else 0] * len(ids)
            tags = [{"n": 1}] * len(ids)
            write = self.made.begin_put("p", ids, specs, sizes, tags, None, now=self.now, ttl_s=9)
        except InvalidRequestError:
            assert surplus
            return
        assert not surplus
        self.made.commit_put(write)
        for pos, each in enumerate(ids):
            self.rows.setdefault(each, set()).update(fields)
            self.seen.add(each)
            for name in fields:
                self.cells[each, name] = (write, pos)

    @rule(ids=st.lists(st.sampled_from(IDS), max_size=4))
    def clear(self, ids):
        present = {each for each in ids if each in self.rows}
        count, _ = self.made.clear("p", ids)
        assert count == len(present)
        for each in present:
            del self.rows[each]
            self.poisoned.add(each.rpartition("_g")[0])
            for task in "tu":
                self.holds.pop((task, each), None)
            for name in FIELDS:
                self.cells.pop((each, name), None)

    def expire(self):
        for key, (_, expires_at, done) in list(self.holds.items()):
            if not done and expires_at <= self.now:
                del self.holds[key]

    def units(self, task, required):
        """Claimable units in order of first write, and how many rows could still be claimed one day."""
        if self.group is None:
            free = [[each] for each in self.rows if (task, each) not in self.holds]
            return [unit for unit in free if required <= self.rows[unit[0]]], len(free)
        groups = {}
        for each in self.rows:
            groups.setdefault(each.rpartition("_g")[0], []).append(each)
        free = [
            members
            for key, members in groups.items()
            if len(members) == self.group
            and key not in self.poisoned
            and not any((task, each) in self.holds for each in members)
        ]
        return [unit for unit in free if all(required <= self.rows[each] for each in unit)], sum(map(len, free))

    @rule(
        target=claims,
        task=st.sampled_from("tu"),
        required=st.sets(st.sampled_from(FIELDS), min_size=1),
        units=st.integers(1, 3),
        all_or_nothing=st.booleans(),
        lease_s=st.sampled_from([None, 2.0, 5.0]),
    )
    def claim(self, task, required, units, all_or_nothing, lease_s):
        self.expire()
        size = units * (self.group or 1)
        ready, claimable = self.units(task, required)
        expected = [each for unit in ready[:units] for each in unit]
        exhausted = (
            len(expected) < size
            and self.total is not None
            and len(self.seen) >= self.total
            and claimable == len(expected)
        )
        if all_or_nothing and len(expected) < size and not exhausted:
            expected = []
        got = self.made.claim(
            "p",
            task,
            sorted(required),
            size,
            all_or_nothing=all_or_nothing,
            lease_s=lease_s,
            tag_filter=None,
            explain=False,
            now=self.now,
        )
        assert list(got.sample_ids) == expected
        if all_or_nothing:
            assert got.exhausted == exhausted
        for index, each in enumerate(expected):
            token = "" if lease_s is None else got.lease_tokens[index]
            self.holds[task, each] = (token, self.now + (lease_s or 0), lease_s is None)
        return (task, expected, list(got.lease_tokens or []))

    @rule(claim=claims, action=st.sampled_from(["ack", "nack", "renew"]))
    def settle(self, claim, action):
        task, ids, tokens = claim
        if not tokens:
            return
        self.expire()
        valid = []
        for each, token in zip(ids, tokens, strict=True):
            hold = self.holds.get((task, each))
            valid.append(hold is not None and hold[0] == token and (not hold[2] or action == "ack"))
        arguments = ("p", task, ids, tokens) + ((3.0,) if action == "renew" else ())
        try:
            getattr(self.made, action)(*arguments, now=self.now)
        except LeaseExpiredError as error:
            lost = list(error.sample_ids)
        else:
            lost = []
        assert lost == [each for each, good in zip(ids, valid, strict=True) if not good]
        if lost:
            return
        for each, token in zip(ids, tokens, strict=True):
            if action == "nack":
                del self.holds[task, each]
            elif action == "ack":
                self.holds[task, each] = (token, self.now, True)
            elif not self.holds[task, each][2]:
                self.holds[task, each] = (token, self.now + 3.0, False)

    @rule(seconds=st.sampled_from([0.5, 2.0, 10.0]))
    def wait(self, seconds):
        self.now += seconds

    @invariant()
    @precondition(lambda self: hasattr(self, "made"))
    def agrees(self):
        assert self.made.list_samples("p", None).sample_ids == list(self.rows)
        live = set(self.cells.values())
        assert self.made.held_bytes == 8 * len(live)
        for each, fields in self.rows.items():
            if fields:
                names = sorted(fields)
                located = self.made.locate("p", [each], names)
                found = {name: (part.write_id, part.positions[0]) for part in located.parts for name in part.fields}
                assert found == {name: self.cells[each, name] for name in names}
        self.expire()
        for task in "tu":
            done = [self.holds.get((task, each), ("", 0, False))[2] for each in self.rows]
            assert self.made.consumed("p", [task]) == (bool(done) and all(done))


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
