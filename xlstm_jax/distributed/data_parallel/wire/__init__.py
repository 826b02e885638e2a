"""Communication between devices: axes, dtypes, collectives, formats of sent shards, and the gradient rule of a gather.

No file here depends on boxes. Each file imports only from earlier files in this list: ``collectives``, ``copies``,
``quantized``, ``communication``, ``blocks``, ``formats``, ``lookup``, ``pieces``, ``transposes``.
"""
