"""Mirrors of a run's metrics in other tools, one module per tool."""
