"""The two digests of the house. They find damage by accident; neither is a defence against whoever can forge bytes.

`fast_hash` is for what is compared often or soon: cells, records of a log, blocks of a recording; `fast_digest` is its
value of one message, as an integer of 64 bits. `lasting_hash` is for what lies on a disk for long: saves, and extents
that are kept.
"""

from xxhash import xxh3_64 as fast_hash, xxh3_64_intdigest as fast_digest, xxh3_128 as lasting_hash

__all__ = ["fast_digest", "fast_hash", "lasting_hash"]
