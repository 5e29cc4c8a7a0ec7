"""Serving engines seen from outside and from inside: a client that measures an endpoint, and plugins."""
