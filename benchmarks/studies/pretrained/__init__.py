"""One round from a pre-trained network with batch norm: FedFisher's Table 3."""
