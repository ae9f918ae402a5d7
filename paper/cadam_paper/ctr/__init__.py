"""Click-through rates: the paper's study of Criteo's display advertising, on the real file or on generated clicks."""
