"""Batching simulators: arrivals, step cost, the engine's rules, schedulers, and what they show."""
