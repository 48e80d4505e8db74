"""The process and its surroundings: rank and device, collectives, files, logs, signals, versions; no model, no data."""
