"""Import of safetensors files whose layout differs from the layout of the model: the inverse of ``publish``.

file    qkv [a + b + b, d]            model   q [a, d]      a view of the rows of qkv: devices read their entries
file    experts.0 [f, d], ...1, ...   model   experts [e, f, d]   assembled on the host, one leaf at a time
"""

import os
from collections import defaultdict
from itertools import islice
from typing import Any, NamedTuple

import jax
import numpy as np

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.checkpoint.publication.layout import Layout, Tensor, tensors_in_layout
from xlstm_jax.distributed.checkpoint.record import names_problem
from xlstm_jax.distributed.checkpoint.safetensors_io import (
    StoredTensor,
    import_targets,
    placed_parameters,
    stored_tensors,
)
from xlstm_jax.distributed.checkpoint.tensor_names import NameMap, stored_at


def import_in_layout(
    path: str | os.PathLike[str],
    abstract_params: PyTree,
    layout: Layout,
    *,
    names: NameMap | None = None,
    ignore: str = "",
) -> PyTree:
    """Reads parameters from safetensors files in the layout of another program, such as files of ``publish``.

    Args:
      path: a folder, such as ``publish`` or ``save_pretrained`` writes, or a ``.safetensors`` file.
      abstract_params: a tree of arrays, or of ``ShapeDtypeStruct`` with shardings, boxed where leaves are split. The
        result has the same shardings and boxes.
      layout: the rules that lead from the model's tensors to the tensors of the files, as in ``publish``. A tensor of
        the model that is assembled from several tensors of the files is unsharded in the memory of each host, at most
        four leaves at a time. From any other tensor each device reads only the entries of its shard.
      names: a map from path patterns to tensor names and layouts, as in ``export_safetensors``; None: default names.
      ignore: a regular expression; tensors whose full name matches are skipped. "" skips no tensor.
    Raises:
      ValueError: names, shapes or dtypes do not fit; a file is damaged; a rule does not fit; or repeated tensors differ
        in the files.
      FileNotFoundError: no model exists at ``path``.

    >>> import tempfile
    >>> from xlstm_jax.distributed.checkpoint import Joined, publish
    >>> folder, layout = tempfile.mkdtemp(), [Joined(("q", "k"), "qk")]
    >>> params = {"q": np.zeros((4, 2)), "k": np.ones((1, 2))}
    >>> version = publish(params, folder, layout=layout)
    >>> import_in_layout(folder, params, layout)["k"].tolist()
    [[1.0, 1.0]]
    """
    stored = stored_tensors(path, ignore)
    like = {
        name: jax.ShapeDtypeStruct(place.shape, leaf.dtype)
        for name_of_leaf, leaf in import_targets(abstract_params).items()
        for place in [stored_at(name_of_leaf, np.shape(leaf), names)]
        for name in place.tensors
    }
    tensors = tensors_in_layout(like, layout)
    if problem := names_problem(stored.keys(), set(tensors), "the layout has"):
        raise ValueError(f"{path} does not fit the parameters: {problem}.")
    pieces: dict[str, list[_Piece]] = defaultdict(list)
    for name, tensor in tensors.items():
        if stored[name].shape != tensor.shape:
            raise ValueError(
                f"{path} does not fit the parameters: '{name}' is {list(stored[name].shape)} in the file, and "
                f"{list(tensor.shape)} by the layout."
            )
        for number, source in enumerate(tensor.leaves()):
            pieces[source.name].append(_Piece(name, stored[name], tensor, number, source))
    return placed_parameters(
        {name: TensorOfPieces(name, like[name].shape, found) for name, found in pieces.items()},
        abstract_params,
        names,
        path,
    )


class _Piece(NamedTuple):
    """Part ``number`` of a stored tensor; ``source`` describes the model's tensor, or part, that has these values."""

    name: str
    stored: StoredTensor
    tensor: Tensor
    number: int
    source: Tensor

    def values(self) -> np.ndarray:
        return next(islice(self.tensor.split_tensor(self.stored.values()), self.number, None))[1]


class TensorOfPieces:
    """Tensor of the model whose values are stored in one or several tensors of files; see ``StoredTensor``."""

    def __init__(self, name: str, shape: tuple[int, ...], pieces: list[_Piece]) -> None:
        self._name, self.shape = name, shape
        # A piece with the undivided tensor comes first: then every further piece can only repeat its values.
        self._pieces = sorted(pieces, key=lambda piece: len(piece.source.place))
        first, *others = self._pieces
        self.dtype = first.stored.dtype
        if unlike := [piece for piece in others if piece.stored.dtype != self.dtype]:
            raise ValueError(
                f"the parts of '{name}' have different dtypes: '{first.name}' is {self.dtype}, and '{unlike[0].name}' "
                f"is {unlike[0].stored.dtype}."
            )

    def values(self) -> np.ndarray:
        """Returns the values of this tensor of the model, put together from tensors of the files that hold its parts.

        The result is a view of the file if a single tensor of a file holds all values, else a new array. Raises a
        ``ValueError`` if two tensors of the files repeat the same part with different values.
        """
        first, *others = self._pieces
        if not others and not first.source.place:
            return first.values()
        result = first.values() if not first.source.place else np.empty(self.shape, first.values().dtype)
        filled = set[str]()
        for piece in self._pieces:
            there, values = piece.source.part_of(result), piece.values()
            if not first.source.place or str(piece.source.place) in filled:
                if there.tobytes() != values.tobytes():
                    raise ValueError(f"layout: '{piece.name}' repeats '{self._name}', and its values differ.")
            else:
                there[...] = values
            filled.add(str(piece.source.place))
        return result

    def converted(self, name: str, dtype: Any, values: np.ndarray) -> np.ndarray:
        return self._pieces[0].stored.converted(name, dtype, values)
