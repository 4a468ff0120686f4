"""Complete training programs that use SSDTrain as a user would, one folder each.

`small` has programs of one page. `deepspeed_gpt` (`ssdtrain demo`) compares keep, recompute and SSDTrain in DeepSpeed;
`megatron_gpt` is a small trainer on megatron-core and its comparison; `support` holds what they and the benchmarks share. May
import every package of the project; no package imports this one, except benchmarks and tests.
"""
