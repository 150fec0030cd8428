"""Claims about `pippin.bayes`."""
