"""The CTR prediction experiments of the paper (tables 1, 2 and 4), on the Criteo data set or on generated clicks."""
