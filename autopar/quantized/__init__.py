"""Quantized weights: linear layers whose weight is stored otherwise than as a tensor of floating-point numbers.

To a plan such a layer is a plain one (:func:`~autopar.quantized.layers.as_plain`). A format says which tensors stand
for the weight, and how their entries lie along its outputs and inputs
(:class:`~autopar.quantized.stored.StoredWeight`); cutting and joining them is the same for all formats.
"""
