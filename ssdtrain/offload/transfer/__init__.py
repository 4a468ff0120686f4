"""The way of the bytes: their states, copies, codecs and buffers, to a tier and back."""
