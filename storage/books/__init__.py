"""The parts of the ledger, one idea each; use them through :class:`storage.ledger.Ledger`."""
