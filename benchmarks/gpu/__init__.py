"""The benchmark of a GPU: GPT, BERT and T5 at the sizes of SSDTrain's table, kept, recomputed and offloaded. See `__main__`.

May import `benchmarks.common`, torch and ssdtrain. Nothing but tests imports it.
"""
