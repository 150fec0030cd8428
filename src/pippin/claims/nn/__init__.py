"""Claims about `pippin.nn`."""
