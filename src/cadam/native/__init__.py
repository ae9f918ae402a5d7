"""The compiled C library: how it is built, found, checked and loaded."""
