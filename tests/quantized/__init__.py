"""Models with quantized weights."""
