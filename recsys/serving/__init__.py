"""AFTER TRAINING: what is done with a finished run."""
