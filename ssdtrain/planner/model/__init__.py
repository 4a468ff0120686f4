"""The cost model: the time line of a training step, given what happens to each block's saved tensors.

What lives here: its types (`types`), the one function to call (`timeline.simulate`), and the engine's rules as it plays them
(`simulation`, `queues`, `streaming`), under the names that they have in `ssdtrain.offload`. It imports nothing of the engine and
measures nothing. A rule that changes there changes here too: `tests/simulation` compares both.
"""
