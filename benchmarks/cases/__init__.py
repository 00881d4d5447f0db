"""A module per subject. Each of its functions with `case` is a case of `python -m benchmarks`."""
