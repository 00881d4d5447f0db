"""Other projects' interfaces over a client of dataplane: `transfer_queue`, which verl uses too, and `nemo_rl`.

Who has a trainer that calls them imports one of the two. Importing this package imports neither.
"""

__all__: list[str] = []
