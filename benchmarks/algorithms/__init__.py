"""Our advantages and losses beside those of public implementations, on one batch (``make compare-algorithms``)."""
