"""Schema inference: which columns of a sample are features, labels, users and times."""
