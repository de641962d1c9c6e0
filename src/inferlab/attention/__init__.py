"""Attention: exact but tiled, and with fewer KV heads."""
