"""Claims about `pippin.train`."""
