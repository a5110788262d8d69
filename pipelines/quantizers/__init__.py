"""The quantizer's parts, from the inside out: steps (scales), pairs (Q/DQ pairs), layers, elementwise (what lies between layers)."""
