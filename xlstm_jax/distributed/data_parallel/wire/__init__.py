"""What travels between devices: names of axes, dtypes, packed bytes, collectives, and the gradient rule of a gather.

Nothing here knows what a box is. Each file imports only from those before it: ``axes``, ``quantized``,
``communication``, ``collectives``, ``tracing``, ``gather_array``.
"""
