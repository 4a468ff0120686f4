"""Profiling of a running model, read by the offload policy and the planner.

Contains `modules` (qualified names of the running modules). Imports torch and `ssdtrain.config` only, and never changes what a
model computes.
"""
