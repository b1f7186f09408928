"""The controller: registry of RNICs, probe lists, coverage, the incident store and the HTTP API."""
