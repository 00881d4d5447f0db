"""Dynamic sampling, as in DAPO: generate until there are enough groups with a learning signal.

Runs in the driver. A group is the rollouts of one prompt: the rows whose ids are equal before the last ``_g``. The
rule reads only tags, so no tensor leaves the store.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from dataplane_core.arguments import Count, checked_as
from dataplane_core.batch import BatchedDataDict
from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import InvalidRequestError, preview
from dataplane_core.ledger import group_of, rollout_of
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import TagFilter, check_tag_filter, group_matches
from dataplane_integrations.errors import SamplingExhaustedError, noted_on
from dataplane_integrations.rollout.first_write import RolloutReceipt

#: Decides on a group from the tags of its rollouts: True keeps it. The tags of a rollout's rows are joined.
GroupRule: TypeAlias = Callable[[Sequence[Mapping[str, Any]]], bool]


def tag_varies(name: str = "reward", *, tolerance: float = 0.0) -> GroupRule:
    """Keeps groups in which the values of a tag differ. With equal rewards, all advantages are 0.

    Args:
        name: A tag that holds a number.
        tolerance: Values that differ by at most this count as equal.
    """

    def varies(group: Sequence[Mapping[str, Any]]) -> bool:
        values = [_number(row, name) for row in group]
        return max(values) - min(values) > tolerance

    return varies


def all_match(tag_filter: TagFilter) -> GroupRule:
    """Keeps groups that match a tag filter, such as ``{"truncated": ("==", False)}``, as those of a claim do."""
    return partial(group_matches, tag_filter=check_tag_filter(tag_filter))


def _number(tags: Mapping[str, Any], name: str) -> float:
    value = tags.get(name)
    if not isinstance(value, (int, float)) or math.isnan(value):
        raise InvalidRequestError(
            f"dynamic sampling refused: a row's tag '{name}' is {value!r}. Expected a number on every row: let the "
            "driver stamp it with meta.stamp_tags({...}) once the rows are scored."
        )
    return float(value)


@dataclass(slots=True, kw_only=True)
class SamplingCounts:
    """What became of the groups of a step.

    Attributes:
        generations: Calls of `DynamicSampling.add`.
        generated: Groups that were added.
        dropped: Groups that the rule refused; their rows were cleared.
        overflow: Groups that the rule kept, beyond the wanted number; their rows were cleared.
        held: Groups that are kept.
    """

    generations: int = 0
    generated: int = 0
    dropped: int = 0
    overflow: int = 0
    held: int = 0

    def __str__(self) -> str:
        return (
            f"{self.generations} generations, {self.generated} groups: {self.held} held, {self.dropped} dropped, "
            f"{self.overflow} too many"
        )


@dataclass(slots=True)
class DynamicSampling:
    """Collects the groups of one step over several generations. Make a new object for each step.

    Example:
        A step of 32 groups of 8::

            sampling = DynamicSampling(policy.client, num_groups=32, group_size=8, max_generations=5)
            meta = sampling.collect(lambda generation: scored(ray.get(rollout.generate.remote(...))))

    Attributes:
        client: The driver's client. Only its ``clear_samples`` is called, at most once per generation.
        num_groups: Groups wanted.
        group_size: Rollouts of a group, which may have several rows each. None: any number.
        keep: The rule.
        max_generations: The limit of generations.
        allow_fewer: At the limit, return the groups that are held (`exhausted` is then True) instead of raising.
        carry: The carries of the held rows, joined, in the order of their meta; wide columns are padded with zeros.
            `take` leaves it here.

    Raises:
        InvalidRequestError: A number below 1.
        InvalidTypeError: An argument has another type.
    """

    client: DataPlaneClient
    num_groups: int
    group_size: int | None
    keep: GroupRule = field(default_factory=tag_varies)
    max_generations: int = 10
    allow_fewer: bool = False
    counts: SamplingCounts = field(default_factory=SamplingCounts, init=False)
    carry: BatchedDataDict = field(default_factory=BatchedDataDict, init=False)
    _held: KVBatchMeta | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for name, form in {"num_groups": Count, "group_size": Count | None, "max_generations": Count}.items():
            checked_as(f"DynamicSampling: {name}", form, getattr(self, name))

    @property
    def missing(self) -> int:
        """Number of groups still wanted."""
        return self.num_groups - self.counts.held

    @property
    def complete(self) -> bool:
        """Whether all wanted groups are held."""
        return self.missing == 0

    @property
    def exhausted(self) -> bool:
        """Whether the generations are used up before the step is complete."""
        return not self.complete and self.counts.generations >= self.max_generations

    def collect(self, generate: Callable[[int], KVBatchMeta | RolloutReceipt]) -> KVBatchMeta:
        """Generates until the step is complete, or the limit is reached.

        Args:
            generate: Called with the number of the generation, from 0. Returns its rows, with the tags that ``keep``
                reads: whole groups, with ids that no earlier generation used. With a receipt, the kept rows of its
                carry are in `carry`.

        Returns:
            The rows of the wanted groups, in the order of generation; the rows of a group are adjacent. With
            ``allow_fewer`` perhaps fewer groups, but at least one.

        Raises:
            SamplingExhaustedError: The limit is reached. All rows of the step have been cleared, as after any other
                error, including one of ``generate``.
        """
        pending: list[KVBatchMeta] = []
        try:
            while not self.complete and not self.exhausted:
                made = generate(self.counts.generations)
                pending = [made.meta if isinstance(made, RolloutReceipt) else made]
                self.add(made)
                pending = []
            return self.take()
        except BaseException as error:
            with noted_on(error, "the rows could not be cleared"):
                self._discard(*pending)
            raise

    def add(self, made: KVBatchMeta | RolloutReceipt) -> bool:
        """Adds one generation. Clears the groups that the rule refuses, and those beyond the wanted number.

        If the clear fails, its error is raised and nothing has changed: add the same generation again.

        Args:
            made: Whole groups, with the tags that ``keep`` reads; or their receipt, with a carry.

        Returns:
            Whether the step is complete.

        Raises:
            InvalidRequestError: Missing tags, an incomplete group, an id that is already held, another partition, no
                generation left, or a carry that does not fit the rows or the earlier carries. Nothing has been cleared.
        """
        receipt = made if isinstance(made, RolloutReceipt) else RolloutReceipt(meta=made)
        meta = receipt.meta
        self._check(meta)
        groups = self._groups(meta)
        tags = meta.tags or []
        kept = [rows for rows in groups if self.keep(_of_rollouts([(meta.sample_ids[row], tags[row]) for row in rows]))]
        wanted, overflow = kept[: self.missing], kept[self.missing :]
        stay = [row for rows in wanted for row in rows]

        part = meta.subset(stay)
        joined = part if self._held is None else self._held.concat(part)
        carry = self._joined_carry(receipt, stay)
        self._clear(meta.drop(stay))  # before anything changes here, so that a call that failed can be repeated
        self.carry = carry
        self._held = joined if joined.size else None
        self.counts.generations += 1
        self.counts.generated += len(groups)
        self.counts.dropped += len(groups) - len(kept)
        self.counts.overflow += len(overflow)
        self.counts.held += len(wanted)
        return self.complete

    def take(self) -> KVBatchMeta:
        """Returns the rows of the step. From now on the caller owns them.

        Raises:
            SamplingExhaustedError: There are fewer groups than wanted (unless ``allow_fewer`` and `exhausted`), or
                none.
        """
        enough = self.complete or (self.allow_fewer and self.exhausted)
        if not enough or self._held is None:
            raise SamplingExhaustedError(
                f"dynamic sampling has {self.counts.held} of {self.num_groups} groups after {self.counts.generations} "
                f"of at most {self.max_generations} generations ({self.counts}). Expected {self.num_groups} groups "
                "that the rule keeps.",
                counts=dataclasses.replace(self.counts),
                hint="Generate more groups at a time, raise max_generations, or use prompts that are neither solved "
                "nor hopeless.",
            )
        taken, self._held = self._held, None
        return taken

    def discard(self) -> None:
        """Clears the held rows, to give the step up. Idempotent. Does not touch rows that `take` has returned."""
        self._discard()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _discard(self, *others: KVBatchMeta) -> None:
        self._clear(self._held, *others)
        if self._held is not None:
            self._held, self.carry, self.counts.held = None, BatchedDataDict(), 0

    def _clear(self, *metas: KVBatchMeta | None) -> None:
        for meta in filter(None, metas):
            self.client.clear_samples(meta.sample_ids, meta.partition_id)

    def _joined_carry(self, receipt: RolloutReceipt, stay: Sequence[int]) -> BatchedDataDict:
        new = BatchedDataDict(receipt.carry)
        if new and new.size != receipt.meta.size:
            raise InvalidRequestError(
                f"dynamic sampling refused: the carry has {new.size} rows. Expected {receipt.meta.size}, as the meta."
            )
        if not stay:
            return self.carry
        kept = new.select_indices(stay) if new else new
        if self._held is None:
            return kept
        if set(kept) != set(self.carry):
            raise InvalidRequestError(
                f"dynamic sampling refused: the carry has the columns {', '.join(kept) or 'none'}. Expected those of "
                f"the earlier generations: {', '.join(self.carry) or 'none'}."
            )
        return BatchedDataDict.from_batches([self.carry, kept]) if kept else kept

    def _check(self, meta: KVBatchMeta) -> None:
        where = f"dynamic sampling refused generation {self.counts.generations} of '{meta.partition_id}'"
        if self.complete or self.exhausted:
            raise InvalidRequestError(
                f"{where}: the step {'is complete' if self.complete else 'has used up its generations'} "
                f"({self.counts}). Expected a new DynamicSampling for the next step."
            )
        if not meta.size or meta.tags is None:
            raise InvalidRequestError(
                f"{where}: {meta.size} rows {'without' if meta.tags is None else 'with'} tags. Expected at least one "
                "row, and tags to decide on: stamp them with meta.stamp_tags({...})."
            )
        held = set() if self._held is None else set(self._held.sample_ids)
        twice = [sample_id for sample_id in meta.sample_ids if sample_id in held]
        if twice:
            raise InvalidRequestError(
                f"{where}: {preview(twice)} came in an earlier generation, whose rows these overwrote. Expected new "
                "ids: put the number of the generation into the uids."
            )

    def _groups(self, meta: KVBatchMeta) -> list[list[int]]:
        """The rows of each group, in the order of their first rows."""
        groups: dict[str, list[int]] = {}
        for row, sample_id in enumerate(meta.sample_ids):
            groups.setdefault(group_of(sample_id), []).append(row)
        for name, rows in groups.items():
            different = {meta.sample_ids[row] for row in rows}
            num_rollouts = len(set(map(rollout_of, different)))
            if len(rows) != len(different) or self.group_size not in (None, num_rollouts):
                raise InvalidRequestError(
                    f"dynamic sampling refused: group '{name}' has {len(rows)} rows, {len(different)} of them "
                    f"different, of {num_rollouts} rollouts. Expected whole groups of {self.group_size}."
                )
        return list(groups.values())


def _of_rollouts(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """The tags of rollouts, from the ids and tags of their rows."""
    rollouts: dict[str, dict[str, Any]] = {}
    for sample_id, tags in rows:
        rollouts.setdefault(rollout_of(sample_id), {}).update(tags)
    return list(rollouts.values())
