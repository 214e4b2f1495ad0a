"""Tenants: keys, limits, usage. docs/tenants.md is the page for who runs a server."""
