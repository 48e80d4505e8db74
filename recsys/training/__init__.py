"""The training loop and all around it: the run directory, evaluation, resume, a sweep of runs."""
