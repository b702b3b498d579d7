"""A discrete-event cluster that drives the real scheduling code: what a run would do on nodes one does not have."""
