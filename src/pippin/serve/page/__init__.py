"""The web page of the server: files without a build step, and the routes that serve them."""
