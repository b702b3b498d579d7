"""The node agent: owns the engine and trainer processes of one node and does what leases ask of them."""
