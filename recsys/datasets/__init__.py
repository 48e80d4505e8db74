"""Converters of public, synthetic and delimited data to Parquet, for `recsys prepare`."""
