"""Claims about `pippin.kits`."""
