"""Other projects' interfaces over a client of dataplane: `transfer_queue` (also for verl), `nemo_rl`, `nemo_gym`,
`areal`, `skyrl`.

Who has a trainer that calls them imports one of these. Importing this package imports none.
"""

__all__: list[str] = []
