"""Operators run one after another, and the same work with fewer passes over memory."""
