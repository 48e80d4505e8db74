"""A run from its config to its result, with training loop, evaluation and resume."""
