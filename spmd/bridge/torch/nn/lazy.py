"""Layers that learn the lengths of their parameters from the first input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from spmd.bridge.torch.nn.layer import Layer
from spmd.errors import LayoutError

__all__ = ["LazyLayer"]

_Mixin: Any = LazyModuleMixin
_Base: Any = Layer if TYPE_CHECKING else object


class LazyLayer(_Mixin, _Base):
    """A layer whose parameters begin uninitialised, as those of torch's lazy modules. It becomes `cls_to_become`.

        class LazyLinear(LazyLayer, Linear):
            cls_to_become = Linear
            _learnt = "in_features"

    A subclass derives from this class and from the layer. Its constructor calls that of the layer, on the device
    "meta", with 0 in place of the length to learn, and then `_wait`. `_length_of` gives the length in the whole of the
    first input, and `_length_in` that in a state that is loaded. Then parameters are made as the layer's constructor
    makes them.
    """

    cls_to_become: Any = None
    _learnt: ClassVar[str]
    """The argument of the layer's constructor that is learnt."""
    _later: dict[str, Any]
    """The other arguments."""

    def _length_of(self, input: torch.Tensor) -> int:
        """The length in the whole of the first input. Collective where its dimension is split."""
        raise NotImplementedError

    def _length_in(self, shapes: dict[str, torch.Size]) -> int:
        """The length in the shapes of parameters and buffers."""
        raise NotImplementedError

    def _wait(self, device: Any, dtype: torch.dtype | None, **arguments: Any) -> None:
        """Make parameters and buffers of unknown lengths uninitialised, and keep the constructor's arguments."""
        self._later = arguments
        options = {"device": torch.get_default_device() if device is None else device, "dtype": dtype}
        parameter: Any = UninitializedParameter
        for name, own in self._parameters.items():
            if own is not None:
                self._parameters[name] = parameter(own.requires_grad, **options)
        for name, own in self._buffers.items():
            if own is not None:
                self._buffers[name] = (
                    UninitializedBuffer(**options) if own.ndim else torch.zeros_like(own, device=options["device"])
                )

    def _split_parameters(self) -> None:
        """Nothing: parameters are split when they are made."""

    def reset_parameters(self, generator: torch.Generator | int | None = None) -> None:
        if not self.has_uninitialized_params():
            super().reset_parameters(generator)

    def initialize_parameters(self, input: torch.Tensor) -> None:
        """Make the parameters for an input, as the layer's constructor does."""
        if self.has_uninitialized_params():
            self._make(self._length_of(input))

    def _make(self, length: int) -> None:
        lazy = {name: own for name, own in (*self._parameters.items(), *self._buffers.items()) if is_lazy(own)}
        first: Any = next(iter(lazy.values()))
        arguments = {self._learnt: length, "device": first.device, "dtype": first.dtype, **self._later}
        layer = self.cls_to_become(**arguments)
        for name, own in lazy.items():
            if name in layer._parameters:
                layer._parameters[name].requires_grad_(own.requires_grad)
        for name in ("_parameters", "_buffers", "_specs", "_placed", "_split", "_packed_names", "_lies", self._learnt):
            if name in vars(layer):
                self.__dict__[name] = vars(layer)[name]

    def _lazy_load_hook(self, state_dict: Any, prefix: str, *_: Any) -> None:
        """Make the parameters before a state is loaded into them."""
        shapes = {
            name: state_dict[prefix + name].shape
            for name in (*self._parameters, *self._buffers)
            if isinstance(state_dict.get(prefix + name), torch.Tensor) and not is_lazy(state_dict[prefix + name])
        }
        if shapes and self.has_uninitialized_params():
            self._make(self._length_in(shapes))

    @classmethod
    def torch_class(cls) -> type[torch.nn.Module]:
        return cls.cls_to_become.torch_class()

    @classmethod
    def from_torch(cls, module: torch.nn.Module, **specs: Any) -> Self:
        return cls.cls_to_become.from_torch(module, **specs)

    def _torch_module(self, filled: bool = False) -> Any:
        if not self.has_uninitialized_params():
            return super()._torch_module(filled)
        where = f"spt.nn.{self._class_name}.to_torch"
        need, mend = "parameters with values", "call the layer first: the input says how long they are"
        raise LayoutError.at(where, got="a layer whose parameters are uninitialised", need=need, mend=mend)
