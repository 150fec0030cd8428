"""Claims about `pippin.evaluate`."""
