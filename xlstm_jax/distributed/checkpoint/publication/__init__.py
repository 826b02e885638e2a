"""Publication of weights, version after version: every process writes, and a reader follows.

files.py     the files of a version, and their names and indices
writers.py   assigns tensors to processes, and sends each tensor to the process that writes the tensor
delta.py     the entries of a tensor that changed
publish.py   the trainer's side
follow.py    the reader's side
reading.py   import of files in the layout of another program, onto a mesh
"""
