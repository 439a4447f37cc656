"""Memory that several processes share: one contract (`base`), one module for each kind of handle."""
