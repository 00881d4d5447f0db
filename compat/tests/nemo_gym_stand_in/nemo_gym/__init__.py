"""A stand-in for NeMo Gym: what the adapter touches of it."""
