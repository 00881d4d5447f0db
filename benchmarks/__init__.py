"""What the data plane costs: `python -m benchmarks` lists the cases. `bench` has what they share."""
