"""Sampling from the policy: the protocol, and the engines that satisfy it."""
