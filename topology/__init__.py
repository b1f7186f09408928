"""The fabric model: switches, hosts, RNICs, links and the paths between them."""
