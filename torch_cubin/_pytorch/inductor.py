"""Inductor's private names: lowerings to extern kernels, custom passes, decompositions.

Inductor takes seconds to import, so nothing here is looked up before it has been imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from torch_cubin._pytorch import inductor_config
from torch_cubin._pytorch.imports import when_imported
from torch_cubin._pytorch.internals import Feature

INDUCTOR = Feature(
    "lowerings and the fold pass of torch.compile",
    "graphs call our ops as any custom op, one by one, into memory of their own",
)


def when_loaded(action: Callable[[], None]) -> None:
    """Runs `action` when Inductor is imported, before it compiles its first graph."""

    def loaded(module: ModuleType) -> None:
        action()

    # Inductor's last module: the others can be imported from here.
    when_imported("torch._inductor.compile_fx", loaded)


GRAPHS = Feature("compiled graphs in audit()", "it does not say that one ran")


def watch_graphs(before: Callable[[], None]) -> None:
    """Calls `before` whenever a compiled graph is about to run."""

    def watch() -> None:
        graph: Any = GRAPHS.find("_inductor.output_code.CompiledFxGraph", None)
        if graph is None:
            return
        run = graph.__call__

        @functools.wraps(run)
        def watched(self: Any, inputs: Any) -> Any:
            before()
            return run(self, inputs)

        graph.__call__ = watched

    when_loaded(watch)


class ExternKernels:
    """Registers lowerings of ops to their out= variants, in memory that Inductor plans."""

    def __init__(self) -> None:
        def find(name: str) -> Any:
            return INDUCTOR.find(f"_inductor.{name}", None)

        self._ir = find("ir")
        self._register = find("lowering.register_lowering")
        self._realizes = find("lowering.add_needs_realized_inputs")
        self._fallback = find("lowering.fallback_handler")
        self._choice = find("select_algorithm.ExternKernelChoice")
        self._virtualized = find("virtualized.V")
        self._shape = find("utils.convert_shape_to_inductor")
        self.choices: dict[Any, Any] = {}  # by out= variant

    def lower(self, ops: Sequence[Any], out_op: Any, name: str, shim: str) -> None:
        """Lowers `ops`, which share a schema, to calls of `out_op`, named ``extern_kernels.<name>``
        in generated Python and `shim` in generated C++.

        NOTE: the name is in cached graphs of other processes: a changed meaning needs a new name.
        """
        choice = self.choices[out_op] = self._choice(out_op, shim, name=name)
        self._realizes(list(ops))
        for op in ops:
            self._register(op, type_promotion_kind=None)(self._lowering(op, out_op, choice))

    def lower_without_out(self, ops: Sequence[Any], raw: Any) -> None:
        """Lowers `ops`, which share a schema, to calls of one of them, which allocates its results
        and reads inputs of any strides."""
        self._realizes(list(ops))
        for op in ops:
            lowering = self._fallback(raw, add_to_fallback_set=False)
            self._register(op, type_promotion_kind=None)(lowering)

    def lower_copy(self, op: Any) -> None:
        """Lowers an op that makes a tensor contiguous to a kernel of its own, into which no reader
        is fused; to nothing where Inductor has made it contiguous already."""

        def lowering(source: Any) -> Any:
            made = self._ir.ExternKernel.require_contiguous(source)
            if made is not source:
                self._virtualized.graph.no_fuse_buffer_names.add(made.get_name())
            return made

        self._register(op, type_promotion_kind=None)(lowering)

    def _lowering(self, op: Any, out_op: Any, choice: Any) -> Any:
        ir = self._ir
        fallback = self._fallback(op, add_to_fallback_set=False)

        def lowering(*args: Any, **kwargs: Any) -> Any:
            graph = self._virtualized.graph
            if graph.cpp_wrapper and out_op not in declared_shims():
                return fallback(*args, **kwargs)
            tensors, rest = [], {}
            for i, argument in enumerate(op._schema.arguments):
                default = argument.default_value
                value = args[i] if i < len(args) else kwargs.get(argument.name, default)
                if isinstance(value, ir.IRNode):
                    tensors.append(ir.ExternKernel.realize_input(value))
                else:
                    rest[argument.name] = value
            value = self._virtualized.current_node.meta["val"]
            layout = ir.FixedLayout(
                tensors[0].get_device(),
                tensors[0].get_dtype(),
                self._shape(value.size()),
                self._shape(value.stride()),
            )
            bound = choice.bind(tensors, layout, ordered_kwargs_for_cpp_kernel=[*rest], **rest)
            return bound.output_node()

        return lowering


CHOICES = Feature(
    "PyTorch's own products beside ours under max-autotune",
    "the choice that is timed as PyTorch's runs ours where install() serves it",
)


def set_choices(choices: Callable[[str, list[Any]], list[Any]], key: Callable[[], Any]) -> None:
    """Passes Inductor's choices for each product through a function, where the user has not set
    choices. `key` becomes part of the key of Inductor's caches.

    Only where PyTorch calls the factory for that key (2.13): older versions pickle it.
    """

    def loaded(config: Any) -> None:
        factories = getattr(config, "_cache_config_factory_keys", ())
        if "inductor_choices_class" in factories:
            ours = functools.partial(_make_choices, choices, key)
            inductor_config.set_default(config, "inductor_choices_class", ours)

    when_imported("torch._inductor.config", loaded)


def _make_choices(choices: Callable[[str, list[Any]], list[Any]], key: Callable[[], Any]) -> Any:
    base: Any = CHOICES.find("_inductor.choices.InductorChoices", None)

    class Choices(base):
        def get_template_configs(self, *args: Any, **kwargs: Any) -> list[Any]:
            theirs = super().get_template_configs(*args, **kwargs)
            return choices(args[2] if len(args) > 2 else kwargs["op_name"], theirs)

        def uuid(self) -> Any:
            return key()

    return Choices()


def extern_choice(function: Callable[..., Any], cpp_name: str, op: Any) -> Any:
    choice = CHOICES.find("_inductor.select_algorithm.ExternKernelChoice", None)
    return choice(function, cpp_name, op_overload=op)


def name_of_extern(choice: Any) -> str:
    """The name of an extern kernel among the choices; "" for templates."""
    return getattr(getattr(choice, "choice", None), "name", "")


def like_extern(choice: Any, kernel: Any, keywords: dict[str, Any] | None = None) -> Any:
    """Another extern kernel, called as this choice; `keywords` are all of its C function's, with
    their defaults, where it is not the choice's own."""
    order = choice.choice.ordered_kwargs_for_cpp_kernel if keywords is None else [*keywords]
    given = {**(keywords or {}), **choice.kwargs}
    return kernel.bind(choice.input_nodes, choice.layout, order, **given)


def example_of(choice: Any) -> torch.Tensor:
    """A fake tensor of the dtype and device of the choice's result."""
    fake_mode = CHOICES.find("_inductor.virtualized.V", None).fake_mode
    with fake_mode:
        return torch.empty(0, dtype=choice.layout.dtype, device=choice.layout.device)


def compiles_cpp() -> bool:
    return CHOICES.find("_inductor.virtualized.V", None).graph.cpp_wrapper


def times_products() -> bool:
    config = CHOICES.find("_inductor.config", None)
    return config.max_autotune or config.max_autotune_gemm


SHIMS_OPTION = "aot_inductor.custom_ops_to_c_shims"


def declared_shims() -> Any:
    """Inductor's setting that lists, for each op, the C functions that generated C++ may call."""
    return INDUCTOR.find(f"_inductor.config.{SHIMS_OPTION}", {})


def set_pass(make: Callable[[Any], Any]) -> None:
    """Puts a pass before Inductor's own passes over a graph; `make` gets the user's pass, or None.

    Called as soon as the settings exist: later, temporary settings might be in place.
    """

    def loaded(config: Any) -> None:
        if not hasattr(config, "post_grad_custom_pre_pass") or pass_type() is None:
            return
        users = config.post_grad_custom_pre_pass
        inductor_config.set_default(config, "post_grad_custom_pre_pass", make(None))
        if users is not None:  # which is this thread's own
            config.post_grad_custom_pre_pass = make(users)

    when_imported("torch._inductor.config", loaded)


def pass_type() -> Any:
    return INDUCTOR.find("_inductor.custom_graph_pass.CustomGraphPass", None)


def can_fold() -> bool:
    """Whether this PyTorch has what a pass needs."""
    return None not in (_find_sort(), _find_trace())


def misreads_dtypes() -> bool:
    """Whether AOTInductor makes a package whose calls of other libraries' operators get dtypes by
    wrong numbers, as before torch 2.12."""
    version = torch.torch_version.TorchVersion(torch.__version__)
    return version < "2.12" and bool(_virtualized().aot_compilation)


def _virtualized() -> Any:
    return INDUCTOR.find("_inductor.virtualized.V", None)


def _find_sort() -> Any:
    return INDUCTOR.find("_inductor.pattern_matcher.stable_topological_sort", None)


def _find_trace() -> Any:
    return INDUCTOR.find("_inductor.pattern_matcher.fwd_only", None)


def keeps_strides_of_results(graph: torch.fx.Graph) -> bool:
    """Whether Inductor gives all of the graph's results the strides that they were traced with,
    whatever a pass does: not those of a branch or a loop's body, nor what a backward reads."""
    (output,) = graph.find_nodes(op="output")
    visible = output.meta.get("user_visible_output_idxs", ())
    (results,) = output.args
    return "original_output_strides" in output.meta and len(visible) == len(results)


def size_hint(size: Any) -> int:
    """A size, or that of the call that a symbolic one was traced with; 0 if it has none."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return 0 if hint is None else int(hint)


def sort(graph: torch.fx.Graph) -> None:
    """Moves nodes behind their arguments, and otherwise keeps their order."""
    _find_sort()(graph)


def traced(function: Callable[..., Any], example: torch.Tensor) -> torch.fx.Graph:
    """The graph of a function by Inductor's decompositions."""
    # A lambda, since a builtin has no signature to read.
    return _find_trace()(lambda x: function(x), [example]).graph
