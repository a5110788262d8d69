"""Kernels of images: antialiased resize and crop on uint8."""
