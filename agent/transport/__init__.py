"""What carries probes: one transport per RNIC behind one narrow protocol."""
