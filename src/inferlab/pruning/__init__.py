"""Pruning: fewer weights, heads or layers, and what each saves in bytes, time and quality."""
