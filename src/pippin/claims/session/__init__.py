"""Claims about `pippin.session`."""
