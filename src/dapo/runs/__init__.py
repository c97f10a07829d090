"""A run on disk: its layout, lock, records and everything that reads them."""
