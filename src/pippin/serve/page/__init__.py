"""The web page of the server: static files without a build step, and their routes."""
