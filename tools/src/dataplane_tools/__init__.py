"""What looks at a running store or at what a run recorded: the commands `dataplane inspect`, `top`, `metrics`, `flow`
and `units`.

Operators and researchers run the commands. No package imports this one.
"""

__all__: list[str] = []
