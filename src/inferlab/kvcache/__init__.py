"""The key-value cache: what it takes, and ways to make it smaller."""
