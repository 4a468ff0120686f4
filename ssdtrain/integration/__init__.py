"""What adapters share: conflicts between a framework's config and ours (`compatibility`), and whose forwards are recorded
(`claims`).

May be imported by adapters only; imports the engine's config. Names no framework: the rows of its tables live in the adapters.
"""
