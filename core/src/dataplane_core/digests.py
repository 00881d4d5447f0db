"""The digests of the house. They find damage, and equal cells; none is a defence against whoever can forge bytes."""

import xxhash

#: For what is compared often or soon: cells, records of a log, blocks of a recording.
fast_hash = xxhash.xxh3_64
#: The value of `fast_hash` of one message, an integer of 64 bits.
fast_digest = xxhash.xxh3_64_intdigest
#: For what lies on a disk for long: saves, and extents that are kept.
lasting_hash = xxhash.xxh3_128
#: For what a store keeps once, however often it is put: 128 bits, so that two different cells never have the same.
content_hash = xxhash.xxh3_128
