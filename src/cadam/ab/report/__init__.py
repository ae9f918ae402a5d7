"""The HTML page of an A/B: its template, figures and colors."""
