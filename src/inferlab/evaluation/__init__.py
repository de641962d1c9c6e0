"""Quality of a variant: perplexity on held-out text, and accuracy on lm-eval tasks."""
