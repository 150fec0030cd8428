"""Claims about `pippin.language`."""
