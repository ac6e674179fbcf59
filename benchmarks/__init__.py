"""Benchmarks against the limit and against other frameworks: ``python -m benchmarks [NAME ...]``."""
