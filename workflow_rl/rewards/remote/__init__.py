"""Rewards that run elsewhere: in a process of their own, or behind a server."""
