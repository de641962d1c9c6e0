"""Weight quantization: the arithmetic, the methods, and the checkpoint formats they are saved in."""
