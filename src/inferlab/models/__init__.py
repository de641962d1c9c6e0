"""Language models: how architectures name their layers, and how checkpoints are loaded."""
