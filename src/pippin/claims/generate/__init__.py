"""Claims about `pippin.generate`."""
