"""The agent: one process per host, one prober and one responder per RNIC."""
