"""`Batching`: how rows become microbatches, for the driver's plan and for a worker that plans itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias, TypeVar

from dataplane_core.errors import ConfigError

#: What the rows are for. A forward alone needs less memory, so its microbatches may have another token limit.
Stage: TypeAlias = Literal["train", "logprob"]

_Section = TypeVar("_Section", "DynamicBatching", "SequencePacking")


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicBatching:
    """Microbatches of rows of similar length.

    Attributes:
        train_mb_tokens: Most padded tokens of a microbatch in training.
        logprob_mb_tokens: The same for a logprob forward; None: as in training.
        sequence_length_round: Padded lengths are multiples of this many tokens.
    """

    train_mb_tokens: int
    logprob_mb_tokens: int | None = None
    sequence_length_round: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePacking:
    """Microbatches of several sequences in one row.

    Attributes:
        train_mb_tokens: Most tokens of a microbatch in training.
        logprob_mb_tokens: The same for a logprob forward; None: as in training.
        algorithm: Name of the packer in `dataplane_core.sharding.packing`.
        sequence_length_pad_multiple: Each sequence is padded to a multiple of this many tokens.
        microbatch_order: ``packer``, or ``largest_first``.
    """

    train_mb_tokens: int
    logprob_mb_tokens: int | None = None
    algorithm: str = "modified_first_fit_decreasing"
    sequence_length_pad_multiple: int = 1
    microbatch_order: str = "packer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """Dynamic batching, sequence packing, or neither: microbatches of a fixed number of rows.

    Attributes:
        dynamic: Dynamic batching, or None.
        packing: Sequence packing, or None.
        pad_multiple: The common padded length is a multiple of this many tokens, and of `length_round`.
        global_batch_size: Rows of each optimizer step over all ranks, in training calls that do not say; None: one step
            for all rows.
        micro_batch_size: Rows per microbatch in training calls that do not say, where no plan is made.
        balance: By what cost the work of the ranks is balanced, as `dataplane_core.shard_meta_for_dp` takes it; None:
            rows and tokens alone divide it.

    Raises:
        ConfigError: Dynamic batching and sequence packing together.
    """

    dynamic: DynamicBatching | None = None
    packing: SequencePacking | None = None
    pad_multiple: int = 1
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    balance: Mapping[str, Any] | Callable[[int], float] | None = None

    def __post_init__(self) -> None:
        if self.dynamic is not None and self.packing is not None:
            raise ConfigError(
                "Batching refused: dynamic batching and sequence packing are both on. Expected one of them, or neither."
            )
        if self.pad_multiple < 1:
            raise ConfigError(f"Batching refused: pad_multiple is {self.pad_multiple}. Expected 1 or more tokens.")

    @classmethod
    def from_config(cls, cfg: Mapping[str, Any]) -> Batching:
        """Reads a policy's config.

        Args:
            cfg: ``dynamic_batching`` and ``sequence_packing``, each with ``enabled`` and the attributes of
                `DynamicBatching` and `SequencePacking`; ``make_sequence_length_divisible_by``; ``balance``;
                ``train_global_batch_size`` and ``train_micro_batch_size``. All are optional; other keys are ignored.

        Raises:
            ConfigError: Both are enabled, or a key that one of them needs is missing.
        """
        multiple = int(cfg.get("make_sequence_length_divisible_by") or 1)
        return cls(
            dynamic=_section(cfg, "dynamic_batching", DynamicBatching),
            packing=_section(cfg, "sequence_packing", SequencePacking, sequence_length_pad_multiple=multiple),
            pad_multiple=multiple,
            global_batch_size=_optional(cfg, "train_global_batch_size"),
            micro_batch_size=_optional(cfg, "train_micro_batch_size"),
            balance=cfg.get("balance"),
        )

    @property
    def length_round(self) -> int:
        """The plan rounds lengths up to a multiple of this many tokens."""
        if self.dynamic is not None:
            return self.dynamic.sequence_length_round
        return 1 if self.packing is None else self.packing.sequence_length_pad_multiple

    @property
    def plans(self) -> bool:
        """Whether microbatches are planned from lengths."""
        return self.dynamic is not None or self.packing is not None

    def shard_args(self, stage: Stage) -> dict[str, Any]:
        """Keyword arguments for ``shard_by_batch_size`` and ``shard_meta_for_dp``."""
        return {
            "dynamic_batching_args": _args(self.dynamic, stage),
            "sequence_packing_args": _args(self.packing, stage),
            "balance": self.balance,
        }


def _args(section: DynamicBatching | SequencePacking | None, stage: Stage) -> dict[str, Any] | None:
    if section is None:
        return None
    options = asdict(section)
    limits = {"train": options.pop("train_mb_tokens"), "logprob": options.pop("logprob_mb_tokens")}
    limit = limits["train"] if limits[stage] is None else limits[stage]
    keys = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}
    return {**keys, "max_tokens_per_microbatch": limit, **options}


def _section(cfg: Mapping[str, Any], name: str, cls: type[_Section], **defaults: Any) -> _Section | None:
    """The attributes of ``cls`` that a section of the config sets; None if it is not enabled."""
    section = cfg.get(name)
    if not section or not section.get("enabled", False):
        return None
    if not section.get("train_mb_tokens"):
        raise ConfigError(
            f"policy config refused: '{name}' is enabled without 'train_mb_tokens'. Expected the most tokens of a "
            f"microbatch; found the keys {', '.join(sorted(map(str, section)))}."
        )
    kinds = {option.name: str if option.type == "str" else int for option in fields(cls)}
    settings = {name: kind(section[name]) for name, kind in kinds.items() if section.get(name)}
    return cls(**{**defaults, **settings})


def _optional(section: Mapping[str, Any], name: str) -> int | None:
    value = section.get(name)
    return None if value is None else int(value)
