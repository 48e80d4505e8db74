"""THE PROCESS AMONG OTHERS: rank and device, collectives, files, logs, signals, versions; no model and no data."""
