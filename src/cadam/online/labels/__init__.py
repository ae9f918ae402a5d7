"""Joining labels to the events they belong to, and the queue of events that are ready to be learned."""
