"""What adapters share: replacing functions with undo (`patching`), conflicts between a framework's config and ours
(`compatibility`), and whose forwards are recorded (`claims`).

May be imported by adapters only (`ssdtrain.pytorch` is one); imports the engine's config. Names no framework:
the rows of its tables live in the adapters.
"""
