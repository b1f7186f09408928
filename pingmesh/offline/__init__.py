"""Inference on recorded counts: records to tables, tables to incidents, with the analyzer's own code."""
