"""Operators that a rank launches: of a forward step, of its LoRA adapters, and of the encoder of images and videos."""
