"""Qualification of flare: what runs the whole of it, on real parts or in simulation, and judges the outcome.

May import every flare package; none imports it. Never published.
"""
