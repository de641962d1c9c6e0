"""Weight quantization: the arithmetic, the methods, and the formats they are saved in."""
