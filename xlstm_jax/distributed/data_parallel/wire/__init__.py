"""Communication between devices: names of axes, dtypes, packed bytes, collectives, and the gradient rule of a gather.

No file here depends on boxes. Each file imports only from earlier files in this list: ``axes``, ``dtypes``,
``collectives``, ``copies``, ``quantized``, ``wires``, ``blocks``, ``formats``, ``communication``, ``tracing``,
``gather_array``, ``lookup``, ``pieces``, ``transposes``.
"""
