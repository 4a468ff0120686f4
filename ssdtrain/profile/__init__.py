"""What is known of a running model: which module saves what.

What lives here: `modules` (qualified names of the modules that are running). May import torch and `ssdtrain.config` alone; the
policy of offloading and the planner read it. It never changes what a model computes.
"""
