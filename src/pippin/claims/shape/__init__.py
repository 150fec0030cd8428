"""Claims about `pippin.shape`."""
