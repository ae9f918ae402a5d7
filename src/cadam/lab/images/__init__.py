"""The image study: networks learn to tell images apart while the images turn or the labels lie."""
