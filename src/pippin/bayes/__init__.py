"""What a model does not know: posteriors over weights, latent codes and simulators, and the scores that judge them."""
