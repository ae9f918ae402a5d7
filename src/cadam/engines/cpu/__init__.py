"""The CPU engines: C kernels, the library they are compiled into, and what calls them."""
