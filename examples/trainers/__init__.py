"""One program per trainer, each under a minute on a CPU: `python -m examples.trainers.sft`.

Each is what a user writes, with one argument or block of SSDTrain's in it. Model, tokenizer and rows come from `tiny`, in
place of your own. Nothing is downloaded. Imported by nothing but tests.
"""
