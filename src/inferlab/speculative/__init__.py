"""Speculative decoding: drafts, the rule that verifies them, and when it pays."""
