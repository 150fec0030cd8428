"""The server: OpenAI's HTTP interface over local models, with keys, limits, figures and a page."""
