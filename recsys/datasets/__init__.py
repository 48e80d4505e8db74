"""PUBLIC AND SYNTHETIC DATA to Parquet; used by scripts only."""
