"""The training loop and what surrounds it: the run directory, evaluation, resume, sweeps of runs."""
