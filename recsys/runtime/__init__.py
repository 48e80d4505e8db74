"""The process among others: rank and device, collectives, files, logs, signals, versions; no model and no data."""
