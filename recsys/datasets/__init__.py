"""Public, synthetic and delimited data to Parquet, for `recsys prepare`."""
