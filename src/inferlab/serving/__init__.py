"""The real engine under load: server process, load generator, metric definitions, experiment."""
