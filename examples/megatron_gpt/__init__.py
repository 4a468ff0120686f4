"""A GPT trainer on megatron-core: `python -m examples.megatron_gpt`, with flags of Megatron-LM's names.

Lives here: its flags (`options`), its text as Megatron's indexed dataset (`text`), the model with schedule and optimizer
(`trainer`), and the demo, which trains the same model three ways in the same processes and compares (`demo`). May import megatron
and what `ssdtrain_megatron` offers. It replaces nothing in megatron; it is small on purpose, and no substitute for Megatron-LM's
training loop.
"""
