"""Stands in for NeMo RL where it is not installed: what the adapter needs of it, and no more."""
