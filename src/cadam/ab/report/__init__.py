"""The outputs of an A/B: console, JSON and HTML page."""
