"""Publication of weights, version after version: every process writes, and a reader follows.

files.py     the files of a version, and their names and indices
writers.py   assigns tensors to processes, and sends each tensor to the process that writes the tensor
delta.py     the changed entries of a tensor
layout.py    rules that join, divide, stack, unstack and repeat tensors for the program of the reader
publish.py   the trainer's side
follow.py    the reader's side
reading.py   import of files in the layout of another program, onto a mesh
"""
