"""Parquet logs to batches: canonical order, decoding, collation, read-ahead."""
