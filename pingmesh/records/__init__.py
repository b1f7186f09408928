"""Record files: what a fabric's probes counted, as columns in Parquet, Arrow or CSV (docs/records.md)."""
