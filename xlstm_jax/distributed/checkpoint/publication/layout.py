"""Layouts in which a tensor of the reader consists of several tensors of the model, or of a part of such a tensor.

  Joined     q [a, d], k [b, d], v [b, d]     <->  qkv [a + b + b, d]
  Divided    qkv [a + b + b, d]               <->  q [a, d], k [b, d], v [b, d]
  Stacked    experts.0 [f, d], experts.1 ...  <->  experts [e, f, d]
  Unstacked  experts [e, f, d]                <->  experts.0 [f, d], experts.1 ...
  Repeated   embed [v, d]                     <->  embed [v, d], lm_head [v, d]

A layout is a sequence of rules, applied in order to the tensors after the map of names (``NameMap``, which renames,
separates layers and transposes dims: ``Stored``). The *reader* is the program that reads the files. The rules are first
applied to shapes, which results in a tree (``Tensor``) for each tensor of the reader; export and import both follow
these trees, so that import is the inverse of export.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from jax.typing import DTypeLike

from xlstm_jax.distributed.checkpoint.tensor_names import compiled
from xlstm_jax.formatting import listed

Index: TypeAlias = tuple[Any, ...]


class Tensor(NamedTuple):
    """Tensor of the reader: the model's tensor ``name`` or a part of it; or several ``parts``, combined along ``dim``.

    With ``is_new_dim`` the parts are stacked along a new dim, else concatenated. ``place`` selects the part of the
    model's tensor by indices that are applied in order; () for the undivided tensor.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    name: str = ""
    parts: tuple["Tensor", ...] = ()
    dim: int = 0
    is_new_dim: bool = False
    place: tuple[Index, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def leaves(self) -> Iterator["Tensor"]:
        """Yields the leaves of this tree of ``parts``, in the order of the parts; a tensor without parts is a leaf.

        Each leaf describes a tensor of the model (``name``), or the part of such a tensor at ``place``.
        """
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.leaves()

    def sources(self) -> Iterator[str]:
        """Yields the name of the model's tensor for each leaf, in the order of ``leaves``.

        A tensor of which several parts are used is named several times.
        """
        for leaf in self.leaves():
            yield leaf.name

    def assembled(self, arrays: Iterator[np.ndarray]) -> np.ndarray:
        """Returns the values of this tensor, stacked or concatenated from tensors of the model.

        ``arrays`` yields a tensor of the model, undivided, for each name of ``sources``, in this order. From the
        iterator only these arrays are taken.
        """
        if not self.parts:
            return self.part_of(next(arrays))
        parts = [part.assembled(arrays) for part in self.parts]
        return np.stack(parts, self.dim) if self.is_new_dim else np.concatenate(parts, self.dim)

    def part_of(self, array: np.ndarray) -> np.ndarray:
        """Returns the part of ``array`` at ``self.place``, as a view; ``array`` is a tensor of the model, undivided.

        For the place () the result is ``array`` itself.
        """
        for index in self.place:
            array = array[index]
        return array

    def split_tensor(self, array: np.ndarray) -> Iterator[tuple["Tensor", np.ndarray]]:
        """Splits ``array``, the values of this tensor, into leaves: yields (leaf, values) in the order of ``leaves``.

        The values of a leaf are a view of ``array``. A leaf describes a tensor of the model, or a part of a tensor of
        the model.
        """
        if not self.parts:
            yield self, array
        start = 0
        for part in self.parts:
            size = 1 if self.is_new_dim else part.shape[self.dim]
            view = array[(slice(None),) * self.dim + (slice(start, start + size),)]
            yield from part.split_tensor(view.reshape(part.shape) if self.is_new_dim else view)
            start += size


class LayoutRule(Protocol):
    """Rule of a layout."""

    def apply(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Applies the rule, such as to join two tensors, to descriptions of tensors; returns the new tensors, by name.

        A ``Tensor`` has a shape, a dtype, and the parts of the model's tensors that it consists of, but no values.
        Tensors that the rule does not concern are in the result unchanged. Raises a ``ValueError`` if the rule does not
        fit the tensors.
        """
        ...


Layout = Sequence[LayoutRule]
NUMBER = "{n}"  # in a name: the number of a part


@dataclass(frozen=True)
class Joined:
    """Joins tensors along an existing dim.

    Attributes:
      parts: a regular expression that matches the full name of the first part; and the names of the further parts,
        which may refer to groups of the expression (``\\1``).
      name: the name of the joined tensor, which may also refer to groups of the expression.
      dim: the dim along which the parts are concatenated.

    >>> rule = Joined((r"(.+)\\.gate", r"\\1.up"), r"\\1.gate_up")
    >>> to_layout({"0.gate": np.zeros(1), "0.up": np.ones(1)}, [rule])
    {'0.gate_up': array([0., 1.])}
    """

    parts: tuple[str, ...]
    name: str
    dim: int = 0

    def apply(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        result = dict(tensors)
        first, *others = self.parts
        for name in tensors:
            if (match := compiled("layout", first).fullmatch(name)) is None:
                continue
            names = [name, *map(match.expand, others)]
            if missing := [name for name in names if name not in result]:
                raise ValueError(f"layout: '{name}' is to be joined with {listed(missing)}, which the model has not.")
            parts = tuple(result.pop(name) for name in names)
            _insert(result, match.expand(self.name), _together(names, parts, self.dim, is_new_dim=False))
        return result


@dataclass(frozen=True)
class Stacked:
    """Stacks numbered tensors, such as experts, along a new first dim.

    Attributes:
      part: a regular expression that matches the full names of the parts, with a group ``n`` for the number, which
        counts from 0.
      name: the name of the stacked tensor, which may refer to further groups of the expression.

    >>> to_layout({"w0": np.zeros(3), "w1": np.ones(3)}, [Stacked(r"w(?P<n>\\d)", "w")])["w"].tolist()
    [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    """

    part: str
    name: str

    def apply(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        result = dict(tensors)
        by_stack: dict[str, dict[int, str]] = defaultdict(dict)
        for name in tensors:
            if match := compiled("layout", self.part).fullmatch(name):
                by_stack[match.expand(self.name)][int(match["n"])] = name
        for stacked, numbered in by_stack.items():
            if sorted(numbered) != list(range(len(numbered))):
                raise ValueError(f"layout: the parts of '{stacked}' have the numbers {sorted(numbered)}, not 0, 1, ...")
            names = [numbered[number] for number in range(len(numbered))]
            parts = tuple(result.pop(name) for name in names)
            _insert(result, stacked, _together(names, parts, 0, is_new_dim=True))
        return result


@dataclass(frozen=True)
class Divided:
    """Divides a tensor of the model into several tensors along a dim: the inverse of ``Joined``.

    Attributes:
      name: a regular expression that matches the full name of the tensor.
      parts: the names of the parts, which may refer to groups of the expression (``\\1``).
      sizes: the sizes of the parts along the dim; () for equal sizes.
      dim: the dim that is divided.

    >>> to_layout({"0.gate_up": np.arange(4)}, [Divided(r"(.+)\\.gate_up", (r"\\1.gate", r"\\1.up"))])
    {'0.gate': array([0, 1]), '0.up': array([2, 3])}
    """

    name: str
    parts: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    dim: int = 0

    def apply(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        result, count = dict(tensors), len(self.parts)
        for name, tensor in tensors.items():
            if (match := compiled("layout", self.name).fullmatch(name)) is None:
                continue
            del result[name]
            has_dim = 0 <= self.dim < len(tensor.shape)
            size = tensor.shape[self.dim] if has_dim else 0
            sizes = self.sizes or (size // count,) * count
            if tensor.parts or not has_dim or len(sizes) != count or sum(sizes) != size:
                raise _cannot_be_split(name, tensor, f"{count} parts of sizes {list(sizes)} along dim {self.dim}")
            start = 0
            for part, size in zip(self.parts, sizes, strict=True):
                index = (*[slice(None)] * self.dim, slice(start, start + size))
                shape = (*tensor.shape[: self.dim], size, *tensor.shape[self.dim + 1 :])
                _insert(result, match.expand(part), tensor._replace(shape=shape, place=(*tensor.place, index)))
                start += size
        return result


@dataclass(frozen=True)
class Unstacked:
    """Splits a tensor of the model into one tensor per entry of its first dim: the inverse of ``Stacked``.

    Attributes:
      name: a regular expression that matches the full name of the tensor.
      part: the name of the parts, with ``{n}`` for the number, which counts from 0. May refer to groups of the
        expression (``\\1``).

    >>> sorted(to_layout({"w": np.ones((2, 3))}, [Unstacked("w", "w{n}")]))
    ['w0', 'w1']
    """

    name: str
    part: str

    def apply(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        result = dict(tensors)
        for name, tensor in tensors.items():
            if (match := compiled("layout", self.name).fullmatch(name)) is None:
                continue
            del result[name]
            if tensor.parts or not tensor.shape:
                raise _cannot_be_split(name, tensor, "parts along its first dim")
            for number in range(tensor.shape[0]):
                part = tensor._replace(shape=tensor.shape[1:], place=(*tensor.place, (number, ...)))
                _insert(result, match.expand(self.part).replace(NUMBER, str(number)), part)
        return result


@dataclass(frozen=True)
class Repeated:
    """Writes a tensor a second time under a second name: tied weights, for readers that look for both names.

    Attributes:
      name: the second name.
      source_name: the name of the tensor to repeat; not a pattern.

    >>> sorted(to_layout({"embed": np.zeros(1)}, [Repeated("head", "embed")]))
    ['embed', 'head']
    """

    name: str
    source_name: str

    def apply(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.source_name not in tensors:
            raise ValueError(f"layout: '{self.name}' is to repeat '{self.source_name}', which the model has not.")
        result = dict(tensors)
        _insert(result, self.name, tensors[self.source_name])
        return result


def tensors_in_layout(like: Mapping[str, "ShapeAndDtype"], layout: Layout) -> dict[str, Tensor]:
    """Returns, by name, a description of each tensor in the published files: a ``Tensor``, without values.

    A ``Tensor`` has a shape, a dtype, and the parts of the model's tensors that the tensor consists of.

    Args:
      like: tensors of the model by name, of which only shapes and dtypes are read.
      layout: the rules that join, divide, stack, unstack or repeat the model's tensors, applied in order.
    Raises:
      ValueError: a rule does not fit the tensors; names the tensors.
    """
    tensors = {name: Tensor(tuple(x.shape), np.dtype(x.dtype), name) for name, x in like.items()}
    for rule in layout:
        tensors = rule.apply(tensors)
    return tensors


def to_layout(arrays: Mapping[str, np.ndarray], layout: Layout) -> dict[str, np.ndarray]:
    """Converts tensors of the model to the tensors of the reader (the program that reads published files), by name.

    ``layout`` has the rules that join, divide, stack, unstack or repeat tensors, applied in order.

    Raises:
      ValueError: a rule does not fit the tensors; names the tensors.

    >>> arrays = {"q": np.zeros((4, 2)), "k": np.ones((1, 2))}
    >>> to_layout(arrays, [Joined(("q", "k"), "qk")])["qk"].shape
    (5, 2)
    """
    tensors = tensors_in_layout(arrays, layout)
    return {name: tensor.assembled(iter([arrays[key] for key in tensor.sources()])) for name, tensor in tensors.items()}


def from_layout(
    arrays: Mapping[str, np.ndarray], layout: Layout, like: Mapping[str, "ShapeAndDtype"]
) -> dict[str, np.ndarray]:
    """Converts tensors of the reader (the program that reads published files) to the tensors of the model, by name.

    Results are views of ``arrays``. Only a tensor of the model that the layout divides or unstacks is a new array, into
    which the parts are copied.

    Args:
      arrays: tensors of the reader, by name.
      layout: the rules that lead from the model's tensors to the reader's, as in ``to_layout``; undone here.
      like: tensors of the model, by name, of which only shapes and dtypes are read.
    Raises:
      ValueError: tensors are missing or left over; a shape or dtype differs; or a tensor that the layout repeats has
        different values in ``arrays``.

    >>> layout, like = [Joined(("q", "k"), "qk")], {"q": np.zeros((4, 2)), "k": np.zeros((1, 2))}
    >>> from_layout({"qk": np.ones((5, 2))}, layout, like)["k"].shape
    (1, 2)
    """
    tensors = tensors_in_layout(like, layout)
    if differ := sorted(tensors.keys() ^ arrays.keys()):
        raise ValueError(f"layout: {listed(differ)} are tensors of the layout or of the arrays, but not of both.")
    given: list[tuple[str, Tensor, np.ndarray]] = []
    for name, tensor in tensors.items():
        array = arrays[name]
        if (array.shape, array.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"layout: the tensor '{name}' is {array.dtype}{list(array.shape)}, and "
                f"{tensor.dtype}{list(tensor.shape)} by the model's tensors."
            )
        given += [(name, source, part) for source, part in tensor.split_tensor(array)]
    by_name: dict[str, np.ndarray] = {}
    filled: set[tuple[str, str]] = set()
    # Undivided tensors first: parts are then only compared with views of the reader's arrays, never written into them.
    for name, source, part in sorted(given, key=lambda one: len(one[1].place)):
        key, undivided = (source.name, str(source.place)), (source.name, str(()))
        if source.name not in by_name:
            by_name[source.name] = np.empty(like[source.name].shape, source.dtype) if source.place else part
        region = source.part_of(by_name[source.name])
        if key in filled or undivided in filled:
            if region.tobytes() != part.tobytes():
                raise ValueError(f"layout: '{name}' repeats '{source.name}', and its values differ.")
        elif source.place:
            region[...] = part
        filled.add(key)
    return by_name


class ShapeAndDtype(Protocol):
    """Attributes of arrays, and of ``jax.ShapeDtypeStruct``, that a layout reads."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> DTypeLike: ...


def _insert(tensors: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    if name in tensors:
        raise ValueError(f"layout: two tensors would have the name '{name}'.")
    tensors[name] = tensor


def _cannot_be_split(name: str, tensor: Tensor, into: str) -> ValueError:
    cure = "Divide it before it is joined or stacked" if tensor.parts else "Sizes must add up to the dim"
    return ValueError(f"layout: '{name}', {tensor.dtype}{list(tensor.shape)}, cannot be split into {into}. {cure}.")


def _together(names: Sequence[str], parts: tuple[Tensor, ...], dim: int, *, is_new_dim: bool) -> Tensor:
    shape = list(parts[0].shape)
    kinds = set()
    for part in parts:
        rest = part.shape if is_new_dim else (*part.shape[:dim], *part.shape[dim + 1 :])
        kinds.add((rest, len(part.shape), part.dtype))
    if len(kinds) > 1 or not (is_new_dim or 0 <= dim < len(shape)):
        shapes = ", ".join(f"{part.dtype}{list(part.shape)}" for part in parts[:3])
        raise ValueError(f"layout: {listed(names)} of {shapes} do not fit together along dim {dim}.")
    if is_new_dim:
        shape.insert(dim, len(parts))
    else:
        shape[dim] = sum(part.shape[dim] for part in parts)
    return Tensor(tuple(shape), parts[0].dtype, "", parts, dim, is_new_dim)
