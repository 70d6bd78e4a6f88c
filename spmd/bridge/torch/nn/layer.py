"""What the layers of `spt.nn` have in common: torch's module, its parameters in blocks, and specs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from spmd.bridge.torch.layouts import LayoutLike, checked_layout, layout_for
from spmd.bridge.torch.partitioned.parameter import Parameter
from spmd.bridge.torch.partitioned.placement import layout_of
from spmd.bridge.torch.rng import drawing
from spmd.bridge.torch.sharded import ShardedModule
from spmd.bridge.torch.tensor_state import is_partitioned, plain
from spmd.errors import LayoutError, describe
from spmd.functions.products import rows_of
from spmd.layout import Layout, P
from spmd.mesh import here

__all__ = ["Layer", "layout_of_rows", "lifted", "on_mesh"]


class Layer(ShardedModule):
    """A layer of torch on arrays that are split. A subclass derives from this class and from torch's.

    Its constructor calls torch's with device="meta", and then `_place`. `_layouts` says how parameters and buffers lie,
    and `forward` calls a function of `spt.functions`.
    """

    _specs: dict[str, Any]
    """The layouts that the constructor got, by the names of its arguments."""
    _spec_names: ClassVar[tuple[str, ...]] = ("spec",)
    """The arguments that say how something is split, in the order of the constructor."""
    _placed: bool = False
    _lies: dict[str, tuple[P | Layout, Layout]]
    """How parameters and buffers lie, for functions of blocks: as they were given, and over all axes of the mesh."""

    def _layouts(self) -> dict[str, LayoutLike]:
        """How parameters and buffers lie, by their names; those that are left out are whole on every worker."""
        return {}

    def _unpacked(self, name: str) -> Sequence[int] | None:
        """The shape in which the layout of a parameter splits it, if that is not its own: as for `spt.Parameter`."""
        return None

    def _layers(self) -> dict[str, tuple[type[Layer], dict[str, Any]]]:
        """The layers that take the place of torch's modules in this one: by name the class, and its specs."""
        return {}

    def _draw(self, whole: Any) -> None:
        """Draw the initial values of torch's module, as its constructor does."""
        if hasattr(whole, "reset_parameters"):
            whole.reset_parameters()

    def _place(self, device: Any, generator: torch.Generator | int | None, **specs: Any) -> None:
        """Lay out parameters that torch's constructor made on the device "meta", and fill them.

        specs: the arguments of the constructor that say how something is split.
        """
        self._set_specs(specs)
        self._split_parameters()
        device = torch.get_default_device() if device is None else torch.device(device)
        if device.type != "meta":
            self.to_empty(device=device)
            self.reset_parameters(generator)

    def _set_specs(self, specs: dict[str, Any]) -> None:
        where = f"spt.nn.{type(self).__name__}"
        self._specs = {name: s if s is None else self._checked_spec(where, name, s) for name, s in specs.items()}
        self._placed = True

    def _checked_spec(self, where: str, name: str, spec: Any) -> Any:
        """The value of an argument that says how something is split."""
        return checked_layout(where, name, spec)

    def _split_parameters(self) -> None:
        """Replace whole parameters and buffers by this worker's blocks."""
        self._lies = {}
        for name, each in self._layouts().items():
            spec: Any = each
            own = self._parameters.get(name)
            if own is not None:
                self.register_shard(name, own, spec, requires_grad=own.requires_grad, unpacked=self._unpacked(name))
                plain_spec = isinstance(spec, P) and self._unpacked(name) is None
                self._note(name, spec if plain_spec else None)
            elif self._buffers.get(name) is not None:
                self._split_buffer(name, spec)
                self._note(name, spec if isinstance(spec, P) else None)
        for name, (layer, specs) in self._layers().items():
            self._modules[name] = layer.from_torch(self.get_submodule(name), **specs)

    def _note(self, name: str, spec: P | None) -> None:
        """Keep how a parameter lies where compiled functions read it."""
        layout = self.shard_layout(name)
        self._lies[name] = _for_functions(layout) if spec is None else spec, lifted(layout)

    def _split_buffer(self, name: str, spec: LayoutLike) -> None:
        persistent = name not in self._non_persistent_buffers_set
        whole: Any = self._buffers[name]
        layout = layout_of(f"spt.nn.{self._class_name}", tuple(whole.shape), spec, here(f"spt.nn.{self._class_name}"))
        if layout.varying:
            self._split |= {name}
            self.register_buffer(name, Parameter(whole, layout, requires_grad=False).detach(), persistent)

    def reset_parameters(self, generator: torch.Generator | int | None = None) -> None:
        """Draw the parameters that torch's module draws, and keep this worker's blocks of them. Nothing is sent.

        generator: as for `spt.drawing`.
        """
        if not self._placed:  # torch's constructor calls it, before there are blocks
            return
        with drawing(generator), torch.no_grad():
            whole = self._torch_module()  # one worker of a process at a time holds it, on the host
            whole.to_empty(device="cpu")
            for name, buffer in self.named_buffers():
                if not is_partitioned(buffer):
                    whole.get_buffer(name).copy_(plain(buffer))
            self._draw(whole)
            self.load_state_dict(whole.state_dict())

    @classmethod
    def torch_class(cls) -> type[nn.Module]:
        """The class of torch that this layer splits."""
        return next(c for c in cls.__mro__ if issubclass(c, nn.Module) and not issubclass(c, ShardedModule))

    @classmethod
    def from_torch(cls, module: nn.Module, **specs: Any) -> Self:
        """The layer with the parameters, options and hooks of a module of torch, which is the same on all workers.

        module: torch's, with whole parameters; or a layer of this class, which may be split otherwise (collective).
        specs: the arguments of the constructor that say what is split. The layer shares no memory with the module.
        Raises LayoutError for another module, and for specs that do not fit.
        """
        where, kind = f"spt.nn.{cls.__name__}.from_torch", cls.torch_class()
        whole = module.to_torch() if isinstance(module, Layer) else module
        if type(whole) is not kind:
            raise LayoutError.at(
                where,
                argument="module",
                got=describe(module),
                need=f"an nn.{kind.__name__}, the same on all workers",
                mend="for a class of your own, write a module with spt.Parameter, or spt.ShardedModule",
            )
        unknown = [name for name in specs if name not in cls._spec_names]
        if unknown:
            raise LayoutError.at(
                where,
                got=f"an argument {unknown[0]!r}",
                need=f"the module, and of {list(cls._spec_names)} those that say what is split",
                mend="options of the layer are those of the module",
            )
        layer = _copied(whole, cls, lambda _, x: x if x is None else _leaf(x.detach().clone(), x))
        layer._set_specs(dict.fromkeys(cls._spec_names) | specs)
        layer._split_parameters()
        return layer

    def to_torch(self) -> Any:
        """The whole layer as torch's module, on every worker, with copies of the parameters. Collective."""
        return self._torch_module(filled=True)

    def _torch_module(self, filled: bool = False) -> Any:
        """torch's module with these options. filled: with the values of parameters and buffers. Collective then."""
        if is_parametrized(self):
            raise LayoutError.at(
                f"spt.nn.{self._class_name}.to_torch",
                got="a layer whose parameters are parametrized",
                need="parameters of its own",
                mend="torch.nn.utils.parametrize.remove_parametrizations(layer, name) first",
            )

        def value(name: str, own: Any) -> Any:
            if own is None:
                return None
            data = self.gathered(name) if filled else torch.empty(own.shape, dtype=own.dtype, device="meta")
            return _leaf(data, own)

        module = _copied(self, self.torch_class(), value)
        for name in ("_specs", "_placed", "_split", "_packed_names", "_lies"):
            vars(module).pop(name, None)
        for name, layer in self._modules.items():
            if isinstance(layer, Layer):
                module._modules[name] = layer._torch_module(filled)
        return module

    def extra_repr(self) -> str:
        parts = [super().extra_repr(), *(f"{n}={s!r}" for n, s in self._specs.items() if s is not None)]
        return ", ".join(part for part in parts if part)

    @property
    def _class_name(self) -> str:
        return next(c.__name__ for c in type(self).__mro__ if c.__module__.startswith("spmd."))

    def _of_parameter(self, name: str) -> P | Layout:
        """How a parameter lies, for a function of blocks."""
        return self._lies[name][0] if name in self._lies else _WHOLE

    def _layout_of_parameter(self, name: str) -> Layout:
        """How a parameter lies, over all axes of the mesh: functions then exchange no lengths."""
        return self._lies[name][1]

    def _block(self, name: str) -> torch.Tensor | None:
        """This worker's block of a parameter, None where the layer has none."""
        return None if self._parameters.get(name, self) is None else self.shard(name)


_WHOLE = P()


def _for_functions(layout: Layout) -> P | Layout:
    return layout if layout.spec is None else on_mesh(layout)


def on_mesh(layout: Layout) -> P | Layout:
    """A layout by a spec over all axes of the mesh, for functions of blocks; the spec alone, if blocks are balanced."""
    assert layout.spec is not None
    lifted_layout = lifted(layout)
    balanced = Layout(layout.shape, layout.spec, lifted_layout.axes)
    return layout.spec if lifted_layout == balanced else lifted_layout


def lifted(layout: Layout) -> Layout:
    """A layout as functions of blocks take it: one by a spec over all axes of the mesh."""
    return layout if layout.spec is None else _over(layout, here("spt.nn").mesh.sides)


@lru_cache(maxsize=1024)
def _over(layout: Layout, axes: tuple[tuple[str, int], ...]) -> Layout:
    return Layout(layout.shape, layout.spec, dict(axes), layout.cuts)


def layout_of_rows(spec: LayoutLike, shape: Sequence[int]) -> LayoutLike:
    """How an array lies that has one entry for each row of an array of this shape, as a bias for weights."""
    if isinstance(spec, P):
        return P(*(names or None for names in spec.dims[:1]))
    axes = here("spt.nn").mesh.axes
    return rows_of(layout_for(tuple(shape), spec, dict(axes)))


def _leaf(data: torch.Tensor, own: Any) -> torch.Tensor:
    """A parameter or buffer with these values, of the kind of another."""
    return nn.Parameter(data, own.requires_grad) if isinstance(own, nn.Parameter) else data


def _copied(module: Any, cls: type, value: Any) -> Any:
    """A module of another class with the options and hooks of a module, and value(name, old) as parameters, buffers."""
    new: Any = object.__new__(cls)
    vars(new).update({k: copy.copy(v) for k, v in vars(module).items()})
    for kind in ("_parameters", "_buffers"):
        vars(new)[kind] = {name: value(name, own) for name, own in vars(module)[kind].items()}
    return new
