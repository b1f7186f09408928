"""A real IP fabric of Linux namespaces on one machine, with fault injection."""
