"""The verbs transport: RDMA UD queue pairs through the distribution's pyverbs."""
