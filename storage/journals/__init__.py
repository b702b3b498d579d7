"""The journal's two databases; open one through :func:`storage.journal.open_journal`."""
