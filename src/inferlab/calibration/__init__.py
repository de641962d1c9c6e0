"""What the linear layers of a model see: one forward pass, shared by every method."""
