"""ONE STEP: look up, compute, agree, update."""
