"""Claims about `pippin.serve`."""
