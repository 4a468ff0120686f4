"""Programs of one page, each under a minute on a CPU: train without SSDTrain and with it, and compare losses to the bit.

`pytorch_loop` (with a plot), `fsdp2`, `deepspeed_zero3`, `deepspeed_pipeline`, `hugging_face` (Trainer) and `lora`. Run one by
`python -m examples.small.pytorch_loop`, or
`torchrun --nproc_per_node 2 -m examples.small.fsdp2`. Spill files go to `--directory`, ./spill by default.
"""
