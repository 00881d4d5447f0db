"""Random histories of a store: the one generator of calls, for all that is compared with the ledger.

A history is a list of steps, which are plain data: commands of the ledger, and a few things that no command is. Steps
name what earlier steps made by numbers that the generator draws, so a history stays one if steps are left out. The
kit's machine takes it on a store, core's tests on two ledgers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias, TypeVar

import torch
from msgspec import structs

from dataplane_core.errors import AlreadyDoneError, DataPlaneError
from dataplane_core.ledger import Command, Ledger, commands
from dataplane_core.spec import Capability, FieldSpec, PartitionInfo, Question, Sampler

_T = TypeVar("_T")

#: Groups of three. The name of a partition is the beginning of that of the other one.
IDS: Final = [f"q{group}_g{member}" for group in range(5) for member in range(3)]
#: Rows of groups of three rollouts: 2 rows are right for one, but its seal may say another number.
ROWS: Final = [f"q{group}_g{rollout}/{row}" for group in range(7) for rollout in range(3) for row in range(2)]
PARTITIONS: Final = ("p", "pq")
TASKS: Final = ("train", "eval")
TAGS: Final[list[dict[str, Any]]] = [
    *({"v": value} for value in (0, 1, 2, 3, -1, 1.5, True, False, None, "a", float("nan"), float("inf"), 2**60)),
    *({"v": value} for value in (-(2**63), 2**63 - 1, 1e-320, -0.0, float("-inf"), "", "\u00fc\n\0\u5b57")),
    *({"v": 2, "rare": "r"}, {"rare": True}, {"late": True}, {"input_lengths": 7}, {"input_lengths": 2, "v": 1}, {}),
]
FILTERS: Final[list[dict[str, tuple[str, Any]]]] = [
    *({"v": (symbol, 1)} for symbol in ("==", "!=", "<", "<=", ">", ">=")),
    *({"v": ("in", [0, 2, "a"])}, {"late": ("==", True)}, {"v": (">=", 1), "rare": ("==", "r")}),
    *({"v": ("any <", 1)}, {"v": ("any in", [0, 2, "a"]), "late": ("==", True)}),
]
#: A lease that does not end while a history lasts, and one whose end the kit waits for.
LONG_S: Final = 36000.0
SHORT_S: Final = 0.02
#: Elements of a cell that is large enough to be stored once with its equals, or narrowed; how many of them fit; and how
#: many differ.
LARGE: Final = 132 * 1024
ROOM_FOR: Final = 4
NUM_LARGE: Final = 11


@dataclass(frozen=True)
class Kind:
    """A kind of cells. A list comes back as a list or as a tensor of the same values."""

    spec: FieldSpec  # that of the field after a put of them
    row: Callable[[int], Any]  # a cell, another one for each number
    size_bytes: int = 0  # what a store with a capacity counts
    shared: bool = False  # whether all rows of a put are equal


def _scalar(number: int) -> torch.Tensor:
    if number % 3:
        return torch.tensor(float(number))
    return torch.tensor(0x7FC00000 | number, dtype=torch.int32).view(torch.float32)  # a NaN with a payload


def _ints(number: int, first: int, count: int = 4000) -> torch.Tensor:
    row = (torch.arange(count) + number) % 100
    row[0] = first
    return row


def _bytes(number: int) -> torch.Tensor:
    return torch.full((LARGE,), number % NUM_LARGE, dtype=torch.uint8)


_INTS: Final = FieldSpec("tensor", "int64", 1)
KINDS: Final = {
    "ragged": Kind(_INTS, lambda number: torch.full((number % 4,), number)),
    "dense": Kind(_INTS, lambda number: torch.tensor([number, number + (1 << 40)])),
    "short": Kind(
        FieldSpec("tensor", "int16", 1), lambda number: torch.full((number % 4,), number % 30_000, dtype=torch.int16)
    ),
    "scalar": Kind(FieldSpec("tensor", "float32", 0), _scalar),
    "column": Kind(FieldSpec("tensor", "float32", 1), lambda number: torch.tensor([float(number)])),
    "unsigned": Kind(FieldSpec("tensor", "uint64", 1), lambda number: torch.tensor([number]).to(torch.uint64)),
    "double": Kind(FieldSpec("tensor", "float64", 0), lambda number: torch.tensor(number / 7).double()),
    "objects": Kind(
        FieldSpec.of_objects(), lambda number: {"n": number, "t": torch.tensor([number])} if number % 3 else None
    ),
    "empty lists": Kind(FieldSpec.of_empty_lists(), lambda number: []),
    "lists of ints": Kind(FieldSpec.of_ints(1), lambda number: [number % 1000] * (1 + number % 2)),
    "lists of floats": Kind(FieldSpec("tensor", "float32", 1), lambda number: [number % 1000 + 0.5]),
    "small ints": Kind(_INTS, lambda number: _ints(number, number % 100)),
    "wide ints": Kind(_INTS, lambda number: _ints(number, (1 << 40) + number)),
    "large": Kind(FieldSpec("tensor", "uint8", 1), _bytes, LARGE),
    "equal": Kind(FieldSpec("tensor", "uint8", 1), _bytes, LARGE, shared=True),
    "large ints": Kind(_INTS, lambda number: _ints(number % NUM_LARGE, number % NUM_LARGE, LARGE), LARGE),
}
#: Field -> the kinds of cells that it is given. It keeps the first one in most cases.
FIELDS: Final = {
    "x": ("ragged", "ragged", "ragged", "dense", "dense", "short", "unsigned", "objects"),
    "y": ("scalar", "scalar", "scalar", "column", "double"),
    "o": ("objects",),
    "l": ("lists of ints", "empty lists", "lists of floats"),
    "w": ("small ints", "wide ints"),
    "e": ("equal", "large"),
}


@dataclass(frozen=True)
class Put:
    """A put, whole."""

    partition_id: str
    sample_ids: Sequence[str]
    columns: Mapping[str, str]  # the kinds of its cells; empty: tags alone
    number: int  # what its cells are made of, and its request id
    tags: Sequence[Mapping[str, Any]] | None = None
    by_content: bool = False  # whether the store keeps large cells by content

    def commands(self, ledger: Ledger, now: float, ttl_s: float = 1e9, size_bytes: int = 0) -> list[Command[Any]]:
        """The put as the ledger gets it: begun and committed, or tags alone. A cell has at least ``size_bytes``."""
        described = reply_of(ledger, commands.InspectRequest(self.partition_id), now)
        held = described.specs if described else {}
        specs = {name: self._spec(kind, held.get(name)) for name, kind in self.columns.items()}
        about = (self.partition_id, self.sample_ids)
        if not specs:
            tags = self.tags or [{}] * len(self.sample_ids)
            return [commands.PutTags(*about, tags, request_id=f"r{self.number}", left_s=ttl_s)]
        writes = []
        for name, kind in self.columns.items():
            rows = [0] * len(self.sample_ids) if KINDS[kind].shared else None
            count = 1 if rows else len(self.sample_ids)
            if self.by_content and KINDS[kind].size_bytes:
                writes.append(self._write_by_content(name, ledger, now))
            else:
                writes.append(commands.Write([name], [KINDS[kind].size_bytes or size_bytes] * count, rows))
        writes.sort(key=lambda write: not write.row_bytes)
        first = self.number * 1000
        begin = commands.BeginPut(
            *(*about, specs, writes, self.tags), write_id=first, ttl_s=ttl_s, request_id=f"r{self.number}"
        )
        return [begin, commands.CommitPut(first)]

    def _write_by_content(self, name: str, ledger: Ledger, now: float) -> Any:
        kind = KINDS[self.columns[name]]
        digests = [f"{kind.spec.to_text()[:13]} {number % NUM_LARGE:2}".encode() for number in self._numbers(name)]
        known = ledger.apply(commands.FindContent(list(dict.fromkeys(digests))), now)
        brought = [digest for digest in dict.fromkeys(digests) if digest not in known]
        order, sizes = [*brought, *known], [kind.size_bytes] * len(brought)
        return commands.Write([name], sizes, list(map(order.index, digests)), brought, list(known.values()))

    def take(self, ledger: Ledger, now: float) -> bool:
        """Puts whole. Returns whether it was carried out, not done already. Raises as the ledger does."""
        try:
            for command in self.commands(ledger, now):
                ledger.apply(command, now)
        except AlreadyDoneError:
            return False
        return True

    def rows(self, field: str) -> list[Any]:
        """The cells of a field."""
        return list(map(KINDS[self.columns[field]].row, self._numbers(field)))

    def _numbers(self, field: str) -> list[int]:
        """What the cells of a field are made of."""
        shared, places = KINDS[self.columns[field]].shared, range(len(self.sample_ids))
        return [self.number if shared else 16 * self.number + place for place in places]

    @staticmethod
    def _spec(kind: str, fixed: FieldSpec | None) -> FieldSpec:
        """A list of ints becomes what its field holds."""
        spec = KINDS[kind].spec
        return fixed if fixed and spec.lists == "ints" and fixed.dtype.startswith("float") else spec


@dataclass(frozen=True)
class Wait:
    """Time passes."""

    seconds: float


@dataclass(frozen=True)
class Stay:
    """A claim that waits until a later step lets it be answered."""

    claim: commands.ClaimRequest


@dataclass(frozen=True)
class Faulty:
    """A step whose reply is ``lost``; or one that is ``late``: the store gets it after its deadline.

    One that is late comes once more in time, but for a put: with that the history ends.
    """

    step: Any
    fault: Literal["lost", "late"]


Step: TypeAlias = Command[Any] | Put | Wait | Stay | Faulty


def reply_of(ledger: Ledger, command: Command[_T], now: float) -> _T | None:
    """A reply of the ledger, or None if it refuses."""
    try:
        return ledger.apply(command, now)
    except DataPlaneError:
        return None


@dataclass
class _Lease:
    """A claim, and what it gave."""

    claim: commands.ClaimRequest
    sample_ids: list[str]
    tokens: list[str]


@dataclass
class History:
    """Draws the steps of a history, one after another, with a look at the ledger that takes them."""

    dice: random.Random
    able: frozenset[str] = frozenset(Capability)  # what the store declares
    real: bool = False  # a store: nobody jumps in time, a put is one step, and leases are short, long or none
    bounded: bool = False  # the store has room for `ROOM_FOR` large cells, and only these are written
    narrows: bool = True
    shares: bool = True
    by_content: bool = True
    count: int = 0
    _next: list[Callable[[], Step | None]] = field(default_factory=list)
    _claims: list[_Lease] = field(default_factory=list)
    _puts: list[Put] = field(default_factory=list)
    _kinds: dict[tuple[str, str], str] = field(default_factory=dict)  # of cells that were put
    _requests: list[Step] = field(default_factory=list)  # that may come again
    _begun: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._next = [partial(self._register, name, keep=False) for name in PARTITIONS]
        able = [weights for needs, weights in _DRAWN.items() if needs <= self.able]
        never = _ONLY_VIRTUAL if self.real else _ONLY_REAL
        self._weights = {name: weight for weights in able for name, weight in weights.items() if name not in never}
        if self.bounded:
            self._weights = {name: weight for name, weight in self._weights.items() if name in _OF_ROOM}
        # a NaN that was saved and loaded is another one
        self._tags = TAGS if self.real else [tags for tags in TAGS if "nan" not in repr(tags)]

    def step(self, ledger: Ledger, now: float) -> Step:
        """The next step."""
        self._ledger, self._now = ledger, now
        while True:
            if self._next:
                drawn = self._next.pop(0)()
            else:
                (name,) = self.dice.choices(list(self._weights), list(self._weights.values()))
                drawn = getattr(self, f"_{name}")()
            if drawn is not None and _NEEDED.get(type(drawn), frozenset()) <= self.able:
                return self._perhaps_faulty(drawn) if self.real else drawn

    def _perhaps_faulty(self, step: Step) -> Step:
        """A few steps are late or lost."""
        fault: Literal["lost", "late"] = self.dice.choice(["lost", "late"])
        rare = isinstance(step, _FAULTY[fault]) and self.dice.random() < (0.1 if isinstance(step, Put) else 0.2)
        waits = isinstance(step, commands.ClaimRequest) and (step.all_or_nothing or step.lease_s == SHORT_S)
        if isinstance(step, Put) and fault == "late":
            step = replace(step, columns={"x": "dense"}, number=self._number(), tags=None) if rare else step
        return Faulty(step, fault) if rare and not waits else step

    def heard(self, step: Step, reply: Any) -> None:
        """What the ledger answered. None: it refused. Some steps are followed by others that belong to them."""
        dice = self.dice
        if isinstance(step, Faulty):
            self.heard(step.step, reply)
        elif isinstance(step, Put):
            self._puts = [*self._puts[-8:], step]
            if reply is not None:
                self._kinds |= {(step.partition_id, name): kind for name, kind in step.columns.items()}
            if "l" in step.columns and dice.random() < 0.6:  # what a list becomes depends on the others of its field
                self._next.append(lambda: self._put(step.partition_id, fields=["l"]))
                self._next.append(lambda: self._read(step.partition_id, fields=["l"]))
            elif dice.random() < 0.5:
                self._next.append(lambda: self._read(step.partition_id, step.sample_ids, list(step.columns)))
        elif isinstance(step, commands.BeginPut) and reply is not None:
            self._begun.append(reply)
        elif isinstance(step, commands.ClaimRequest) and reply is not None:
            self._claimed(step, reply)
        elif isinstance(step, Stay):
            self._next += dice.choices(self._ends_of(step.claim), k=dice.randint(1, 3))
        elif isinstance(step, commands.ClearRequest) and reply is not None:
            self._was_cleared(step)
        elif isinstance(step, commands.RegisterRequest) and step.if_exists == "replace":
            self._kinds = {key: kind for key, kind in self._kinds.items() if key[0] != step.partition_id}
            self._next += self._after_registration(step) if self._claims else ()
        elif isinstance(step, commands.RenewRequest) and reply is not None:
            self._next.append(lambda: self._inspect(step.partition_id))
        elif isinstance(step, commands.NackRequest) and reply is None and dice.random() < 0.5:
            self._next.append(lambda: self._claim(step.partition_id, step.task_name))

    def _claimed(self, claim: commands.ClaimRequest, reply: Any) -> None:
        dice, ids = self.dice, list(reply.sample_ids)
        if ids and reply.lease_tokens:
            self._claims = [*self._claims[-8:], _Lease(claim, ids, list(reply.lease_tokens))]
            if dice.random() < 0.4:
                self._next += [lambda: self._settle(ago=0)] * dice.randint(1, 2)
            if claim.lease_s == SHORT_S and dice.random() < 0.7:
                self._next.append(lambda: self._claim(claim.partition_id, claim.task_name))
        if claim.dp_rank is None or dice.random() < 0.3:
            return
        number = dice.choice([claim.dp_rank, 1 - claim.dp_rank, 1 - claim.dp_rank])
        again = structs.replace(claim, dp_rank=number)
        if ids and dice.random() < 0.4:
            again = claim
            self._next.append(lambda: commands.ClearRequest(claim.partition_id, ids[:1]))
            self._next.append(lambda: self._put(claim.partition_id, ids[:1]))
        elif not ids and dice.random() < 0.7:  # samples come back
            self._next.append(lambda: commands.SetCursorRequest(claim.partition_id, claim.task_name, []))
        self._next.append(lambda: self._fresh(again))

    def _was_cleared(self, step: commands.ClearRequest) -> None:
        dice, where = self.dice, step.partition_id
        if step.sample_ids is None:
            if dice.random() < 0.5 and where in PARTITIONS:
                self._next += [self._repeat, partial(self._register, where, keep=False), self._repeat]
        elif dice.random() < 0.6:
            ids = list(step.sample_ids)
            then: list[list[Callable[[], Step | None]]] = [
                [partial(commands.ClearRequest, where, ids)],
                [partial(self._put, where, ids), partial(self._claim, where)],
                [self._repeat],
            ]
            self._next += dice.choice(then)

    def _ends_of(self, claim: commands.ClaimRequest) -> list[Callable[[], Step | None]]:
        """What may end the wait of a claim."""
        where, task = claim.partition_id, claim.task_name
        return [
            partial(self._finish, where),
            partial(self._finish, where),
            partial(self._put, where, fields=claim.required_fields),
            partial(self._put_tags, where),
            partial(self._settle, 0),
            partial(commands.SetCursorRequest, where, task, []),
            partial(commands.ClearRequest, where, self._some_ids(where)[:3]),
            partial(commands.ClearRequest, where, None),
        ]

    def _after_registration(self, step: commands.RegisterRequest) -> Iterable[Callable[[], Step | None]]:
        """Old tokens meet new leases of the same samples."""
        lease = self.dice.choice(self._claims)
        claim = structs.replace(lease.claim, partition_id=step.partition_id, lease_s=LONG_S, tag_filter=None)
        claim = structs.replace(
            claim, all_or_nothing=False, dp_rank=None, dp_size=None, sampler="first_write", batch_index=0
        )
        yield lambda: self._put(step.partition_id, lease.sample_ids, claim.required_fields)
        yield lambda: self._fresh(claim)
        yield lambda: self._settle_these(lease, range(len(lease.sample_ids)))

    def _number(self) -> int:
        self.count += 1
        return self.count

    def _part(self) -> str:
        return self.dice.choice(["p", "p", "p", "pq"]) if self.dice.random() < 0.98 else "nowhere"

    def _group_size(self, where: str) -> int | None:
        info = self._info(where)
        return None if info is None or info.rollouts else info.grpo_group_size

    def _info(self, where: str) -> PartitionInfo | None:
        return reply_of(self._ledger, commands.DescribeRequest(where), self._now)

    def _has_rollouts(self, where: str) -> bool:
        info = self._info(where)
        return info is not None and info.rollouts

    def _ids(self, where: str) -> list[str]:
        return ROWS if self._has_rollouts(where) else IDS

    def _some_ids(self, where: str = "") -> list[str]:
        dice = self.dice
        if self.bounded:
            return dice.sample(IDS[:6], dice.choice([1, 1, 2, 3]))
        info = self._info(where)
        if info is not None and info.rollouts:
            of_group = ROWS[6 * dice.randrange(7) :][:6]
            whole = of_group[: 2 * (info.grpo_group_size or 2)]
            some = whole if dice.random() < 0.7 else dice.sample(of_group, dice.randint(1, 4))
            return some if dice.random() < 0.98 else [*some, "q0_g0"]
        fit = [name for name in IDS if self._group_size(where) != 2 or name[-1] != "2" or dice.random() < 0.1]
        if dice.random() < 0.5:  # whole groups
            first = dice.randrange(5)
            near = [name for name in fit if int(name[1]) in (first, (first + 1) % 5)]
            return near[: dice.choice([2, 3, 6])]
        return dice.sample(fit, dice.randint(1, 6))

    def _fields(self) -> list[str]:
        if self.bounded:
            return ["e"]
        rare = [["o"], ["l"], ["x", "l"], ["w"], ["e"], ["x", "o", "y"], ["y", "x"]]
        return list(self.dice.choice([["x"], ["y"], ["x", "y"], self.dice.choice(rare)]))

    def _required(self, where: str) -> list[str]:
        """Fields that a claim can often get."""
        puts = [put for put in self._puts if put.partition_id == where and put.columns]
        if not puts or self.dice.random() < 0.3:
            return self._fields() if self.dice.random() < 0.8 else []
        return list(self.dice.choice(puts).columns)

    def _columns(self, where: str, fields: Sequence[str]) -> dict[str, str]:
        if self.bounded:
            if self.narrows and self.dice.random() < 0.2:
                return {"w": "large ints"}
            return {"e": self.dice.choice(["large", "equal"] if self.shares else ["large"])}
        kinds = {name: self.dice.choice(FIELDS[name]) for name in fields}
        if self.dice.random() < 0.15:
            return kinds
        return {name: kind if name in "lwe" else self._kinds.get((where, name), kind) for name, kind in kinds.items()}

    def _register(self, name: str = "", keep: bool | None = None) -> Step:
        dice = self.dice
        keeps = dice.random() < 0.6 if keep is None else keep
        where, group = name or dice.choice(PARTITIONS), dice.choice([None, None, None, 2, 3])
        info = self._info(where)
        if keeps and info is not None and dice.random() < 0.8:
            group = info.grpo_group_size
        rollouts = info.rollouts if keeps and info is not None else dice.random() < 0.25
        if Capability.GROUPS not in self.able:
            group = None
        rollouts = rollouts and Capability.GROUPS in self.able and not self.bounded
        num_samples = dice.choice([None, None, 24] if rollouts else [None, None, 6, 12])
        tasks = dice.choice([TASKS, TASKS, TASKS, TASKS[:1]])
        return commands.RegisterRequest(
            *(where, dice.choice([["x"], ["x", "y"], ["y"]]), num_samples, list(tasks)),
            *(group, dice.choice([{}, {"o": ["a"]}, {"o": ["b"]}]), f"e{self._number()}"),
            if_exists="keep" if keeps else "replace",
            rollouts=rollouts != (dice.random() < 0.02),
        )

    def _finish(self, name: str = "") -> Step | None:
        """As `finish_partition`: the group size is that of the partition."""
        where = name or self.dice.choice(PARTITIONS)
        info = self._info(where)
        if info is None:
            return None
        return commands.RegisterRequest(
            *(where, [], 0, [], info.grpo_group_size, {}, f"e{self._number()}"),
            if_exists="keep",
            rollouts=info.rollouts,
        )

    def _put(self, name: str = "", ids: Sequence[str] = (), fields: Sequence[str] = ()) -> Put:
        dice, where = self.dice, name or self._part()
        ids = list(ids) or self._some_ids(where)
        columns, number = self._columns(where, fields or self._fields()), self._number()
        tags = [dice.choice(self._tags) for _ in ids] if dice.random() < 0.5 else None
        put = Put(where, ids, columns, number, tags=tags, by_content=self.by_content)
        put = self._sealing(put) if self._has_rollouts(where) and dice.random() < 0.7 else put
        self._requests = [*self._requests[-6:], put]
        return put

    def _put_tags(self, name: str = "") -> Step:
        where = name or self._part()
        ids = self._some_ids(where)
        put = Put(where, ids, {}, self._number(), tags=[self.dice.choice(self._tags) for _ in ids])
        return self._sealing(put) if self._has_rollouts(where) else put

    def _sealing(self, put: Put) -> Put:
        """The put, with seals of most of its rollouts, and now and then of its groups."""
        dice, tags = self.dice, []
        for row in put.tags or [{}] * len(put.sample_ids):
            seals = {"rollout_rows": dice.choice([2] * 50 + [1, 3])} if dice.random() < 0.8 else {}
            ends = {"group_rollouts": dice.choice([2] * 30 + [1, 3])} if dice.random() < 0.15 else {}
            tags.append({**row, **seals, **ends})
        return replace(put, tags=tags)

    def _put_again(self) -> Step | None:
        """The very cells of an earlier put, with their values of now."""
        return replace(self.dice.choice(self._puts), number=self._number()) if self._puts else None

    def _begin(self) -> Step:
        return self._put().commands(self._ledger, self._now, self.dice.choice([3.0, 30.0]), 8)[0]

    def _commit(self) -> Step | None:
        ago = self.dice.randrange(4)
        kind = self.dice.choice([commands.CommitPut] * 5 + [commands.AbortPut])
        return kind(self._begun.pop(-1 - ago)) if ago < len(self._begun) else None

    def _repeat(self) -> Step | None:
        """A put, ack, nack or renew whose reply was lost comes again, with the same id."""
        if Capability.REPEATABLE not in self.able or not self._requests:
            return None
        return self.dice.choice(self._requests[-3:])

    def _read(self, name: str = "", ids: Sequence[str] = (), fields: Sequence[str] = ()) -> Step:
        where = name or self._part()
        fields = list(fields) or self._fields()
        if not ids and self.dice.random() < 0.75:  # cells that are there
            there = partial(commands.Locate, where, fields=fields)
            ids = [name for name in self._ids(where) if reply_of(self._ledger, there([name]), self._now)]
        some = self.dice.choices(list(ids) or self._ids(where), k=self.dice.randint(1, 6))
        return commands.Locate(where, some, fields)

    def _clear(self) -> Step:
        where = self._part()
        return commands.ClearRequest(where, self.dice.sample(self._ids(where), self.dice.randint(1, 3)))

    def _clear_all(self) -> Step:
        return commands.ClearRequest(self._part(), None)

    def _filter(self) -> dict[str, tuple[str, Any]] | None:
        wanted = Capability.TAG_FILTERS in self.able and self.dice.random() < 0.3
        return self.dice.choice(FILTERS) if wanted else None

    def _claim(self, name: str = "", task: str = "") -> commands.ClaimRequest:
        dice, where = self.dice, name or self._part()
        leases = [LONG_S, LONG_S, SHORT_S] if self.real else [2.0, 5.0, 20.0]
        waits = dice.random() < 0.4
        return commands.ClaimRequest(
            where,
            task or (dice.choice(TASKS) if dice.random() < 0.98 else "nobody"),
            self._required(where),
            dice.choice([1, 1, 2, 2, 3, 4]) * (self._group_size(where) or 1) + (dice.random() < 0.03),
            all_or_nothing=waits,
            explain=waits and self.real,
            lease_s=dice.choice([None, *leases]) if Capability.LEASES in self.able else None,
            tag_filter=self._filter(),
            sampler="freshest" if Capability.SAMPLERS in self.able and dice.random() < 0.25 else "first_write",
            token=f"k{self._number()}",
            max_rows=dice.choice([1, 3, 5]) if dice.random() < 0.1 else None,
            max_tokens=dice.choice([1, 9, 20]) if dice.random() < 0.1 else None,
        )

    def _fresh(self, claim: commands.ClaimRequest) -> Step:
        """A claim like another one."""
        return structs.replace(claim, token=f"k{self._number()}")

    def _claim_of_rank(self) -> Step:
        dice, claim = self.dice, self._claim()
        size = dice.choice([None, 2, 2])
        samplers: list[Sampler] = ["first_write", "freshest", "balanced"]
        return structs.replace(
            claim,
            # all claims of a batch with a lease, or all without
            lease_s=LONG_S if self.real and Capability.LEASES in self.able else claim.lease_s,
            sampler=dice.choice(samplers if size else samplers[:2]),
            dp_rank=dice.randrange(2),
            dp_size=size,
            max_rows=None if size else claim.max_rows,
            max_tokens=None if size else claim.max_tokens,
            batch_index=dice.choice([0, 0, 1, 2]),
        )

    def _stay(self) -> Step:
        claim = self._claim(task="train")
        lease_s = None if claim.lease_s is None else LONG_S
        fields = claim.required_fields or ["x"]
        return Stay(structs.replace(claim, all_or_nothing=True, explain=False, required_fields=fields, lease_s=lease_s))

    def _settle(self, ago: int | None = None) -> Step | None:
        ago = self.dice.choice([0, 0, 0, 1, 2, 5]) if ago is None else ago
        if ago >= len(self._claims):
            return None
        lease = self._claims[-1 - ago]
        places: Sequence[int] = range(len(lease.sample_ids))
        if self.dice.random() < 0.4:
            places = self.dice.sample(places, self.dice.randint(1, len(places)))
        return self._settle_these(lease, places)

    def _settle_these(self, lease: _Lease, places: Iterable[int]) -> Step:
        dice, claim = self.dice, lease.claim
        some = [(lease.sample_ids[place], lease.tokens[place]) for place in places]
        request_id = f"s{self._number()}"
        about = (claim.partition_id, claim.task_name, [name for name, _ in some], [token for _, token in some])
        kind: Any = dice.choice(
            [commands.AckRequest, commands.NackRequest, commands.NackRequest, commands.RenewRequest]
        )
        extra = [LONG_S if self.real else 4.0] if kind is commands.RenewRequest else []
        settle: commands.SettleRequest = kind(*about, *extra, request_id=request_id, left_s=1e9)
        self._requests = [*self._requests[-6:], settle]
        return settle

    def _set_cursor(self) -> Step:
        where, create = self._part(), not self.real and self.dice.random() < 0.5
        some = self.dice.sample(self._ids(where), self.dice.choice([0, 4]))
        return commands.SetCursorRequest(where, self.dice.choice(TASKS), some, create)

    def _list(self) -> Step:
        return commands.ListRequest(self._part(), self._filter(), self.dice.choice([None, None, self._some_ids()]))

    def _list_partitions(self) -> Step:
        return commands.ListPartitionsRequest()

    def _inspect(self, name: str = "") -> Step:
        questions = []
        if Capability.CLAIMS in self.able:
            for _ in range(self.dice.randint(0, 2)):
                explain, task = self.real and self.dice.random() < 0.5, self.dice.choice([*TASKS, "nobody"])
                about: dict[str, Any] = {"required_fields": self._fields(), "tag_filter": self._filter()}
                questions.append(Question(task_name=task, explain=explain, **about))
        return commands.InspectRequest(name or self._part(), questions)

    def _list_fields(self) -> Step:
        where = self._part()
        listed = reply_of(self._ledger, commands.ListRequest(where), self._now)
        there = list(listed.sample_ids) if listed and self.dice.random() < 0.8 else []
        return commands.FieldsRequest(where, self.dice.sample(there or IDS, min(3, len(there or IDS))))

    def _export(self) -> Step:
        return commands.ExportRequest(self._part())

    def _consumed(self) -> Step:
        tasks = self.dice.sample([*TASKS, *TASKS, "nobody"], self.dice.randint(1, 2))
        return commands.ConsumptionRequest(self._part(), list(dict.fromkeys(tasks)))

    def _wait(self) -> Step:
        return Wait(self.dice.choice([0.125, 0.5, 0.5, 1.0, 3.0, 10.0]))


#: What operations need -> them, and how often each is drawn.
_DRAWN: Final[dict[frozenset[str], dict[str, float]]] = {
    frozenset(): {"register": 0.7, "finish": 0.5, "put": 14, "put_tags": 2, "put_again": 1, "begin": 5, "commit": 5}
    | {"read": 6, "clear": 3, "clear_all": 0.3, "wait": 6},
    frozenset({Capability.REPEATABLE}): {"repeat": 2},
    frozenset({Capability.CLAIMS}): {"claim": 12, "stay": 2.5, "consumed": 2},
    frozenset({Capability.CLAIMS, Capability.SAMPLERS}): {"claim_of_rank": 3},
    frozenset({Capability.CLAIMS, Capability.LEASES}): {"settle": 6},
    frozenset({Capability.LISTING}): {"list": 2, "list_partitions": 0.3, "list_fields": 1, "inspect": 3},
    frozenset({Capability.CURSORS}): {"set_cursor": 0.8, "export": 1},
}
#: Fault -> the steps that may have it. Of those that may be late, only a put does more when it comes again.
_FAULTY: Final[Mapping[str, tuple[type, ...]]] = {
    "late": (Put, commands.Locate, commands.ListRequest, commands.RegisterRequest, commands.ClearRequest),
    "lost": (Put, commands.RegisterRequest, commands.ClearRequest, commands.ClaimRequest, commands.SettleRequest),
}
#: What steps need that follow others of which a store may be able without them.
_NEEDED: Final[Mapping[type, frozenset[str]]] = {
    commands.ClaimRequest: frozenset({Capability.CLAIMS}),
    commands.InspectRequest: frozenset({Capability.LISTING}),
    commands.SetCursorRequest: frozenset({Capability.CURSORS}),
}
_ONLY_REAL: Final = ("stay",)
_OF_ROOM: Final = ("put", "put_again", "repeat", "read", "clear", "clear_all")
_ONLY_VIRTUAL: Final = ("begin", "commit", "wait")
