"""Events, schemas and the sources that events are read from."""
