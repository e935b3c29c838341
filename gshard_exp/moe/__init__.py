"""Routing (Algorithm 1), dispatch (Algorithm 2) and the Mixture-of-Experts layer."""
