"""Distillation: a classifier's teacher and students, and training on generated questions."""
