"""The two digests of the house. They find damage and equal cells; neither is a defence against who can forge bytes."""

import xxhash

#: For what is compared often or soon: cells, records of a log, blocks of a recording.
fast_hash = xxhash.xxh3_64
#: The value of `fast_hash` of one message, an integer of 64 bits.
fast_digest = xxhash.xxh3_64_intdigest
#: For what lies on a disk for long, such as saves, and for cells that a store keeps once, however often they are put:
#: so many bits that two different cells do not have the same by chance.
lasting_hash = xxhash.xxh3_128
