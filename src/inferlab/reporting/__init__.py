"""Results for a reader: tables over the metrics of a run."""
