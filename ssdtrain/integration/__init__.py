"""What adapters share: replacing functions (`patching`), what collectives carry (`traffic`) and their interception (`intercept`),
error feedback in checkpoints (`residuals`), conflicts between a framework's config and ours (`compatibility`), who records a
model (`claims`), hooks of a model inside of ours (`inner_hooks`).

May be imported by adapters only (`ssdtrain.pytorch` is one); imports the engine. Names no framework: the rows of its tables live
in the adapters.
"""
