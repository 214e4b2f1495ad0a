"""Check keys, enforce the limits of tenants and record their usage. docs/tenants.md is the page for operators."""
