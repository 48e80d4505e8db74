"""After training: what is done with a finished run."""
