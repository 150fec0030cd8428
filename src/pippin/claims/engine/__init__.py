"""Claims about `pippin.engine`."""
