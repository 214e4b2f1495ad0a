"""Write quantized copies of checkpoints, for ``dovetail quantize``."""
