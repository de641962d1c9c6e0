"""Watching a server: its metrics over time, alert rules, dashboards, what to do about it."""
